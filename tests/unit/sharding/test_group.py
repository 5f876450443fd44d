"""A parameter group's gradients in one micro-batch, and the order of their reductions."""

from __future__ import annotations

import itertools
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from dtrain.distributed.communicator import GradientSend
from dtrain.distributed.transport.single_rank import SingleRank
from dtrain.errors import ContractError, UsageError
from dtrain.parameters.micro_batch_weight import Weight
from dtrain.sharding import group as group_module
from dtrain.sharding.accumulate import RunningSum
from dtrain.sharding.gradients import ExchangedSending, FlatGradient, LocalSending, slot_parts
from dtrain.sharding.group import FlatBuffer, ParameterGroup
from dtrain.sharding.layout import FlatLayout, ParamSpec, flat_layouts
from dtrain.sharding.placement import STAGES, Placement
from dtrain.sharding.reduce import GradientReducer
from dtrain.sharding.replicas import ParameterViews, Replica
from dtrain.sharding.storage_pool import FlatTensor, StoragePool
from tests.helpers.many_ranks import sent_gradient
from tests.helpers.op_dtypes import operations_of

COMM = SingleRank(torch.device("cpu"))
ONE = Weight(torch.ones(()), is_one=True)
THREE = Weight(torch.tensor(3.0))
SHAPES = {"w": (3, 2), "v": (4,), "b": (2,)}
NUMBERS = {"v": 0, "w": 1, "b": 2}  # backward is expected to reach the last one of a flat buffer first


def make_group(kind: str) -> ParameterGroup:
    """Returns a group of three parameters, `b` alone in its flat buffer; the main grads are NaN where they may be."""
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    specs = [ParamSpec(name, SHAPES[name], torch.bfloat16, 0) for name in ("w", "v")]
    specs.append(ParamSpec("b", SHAPES["b"], torch.float32, 1))
    layouts = flat_layouts("unit", specs, 1)
    sends = [GradientSend(layout.name, layout.numel, torch.float32, layout.extents) for layout in layouts]
    exchange = COMM.gradient_exchange(sends, 0)
    exchange.begin(ONE.value)

    def gradient(number: int, layout: FlatLayout) -> FlatGradient:
        segment, grad = Placement.SHARD.segment(layout, 0), torch.zeros(layout.numel)
        for start, stop in layout.extents:
            grad[start:stop] = torch.nan
        if kind == "accumulated":
            return FlatGradient(segment, COMM, grad, LocalSending(segment, COMM, grad, torch.float32))
        return FlatGradient(segment, COMM, grad, ExchangedSending(layout, exchange, number), RunningSum(grad))

    def buffer(number: int, layout: FlatLayout) -> FlatBuffer:
        replica = Replica(layout, ParameterViews(layout, parameters), COMM, STAGES[2], StoragePool(COMM.device))
        segment = Placement.SHARD.segment(layout, 0)
        return FlatBuffer(segment, replica, torch.zeros(layout.numel), {}, gradient(number, layout))

    return ParameterGroup("unit", [buffer(number, layout) for number, layout in enumerate(layouts)], ())


def micro_batch(
    group: ParameterGroup, grads: dict[str, float], weight: Weight = ONE, *, is_first: bool = True
) -> dict[str, Tensor]:
    """Returns the gradients of a micro-batch as they are reduced."""
    group.begin_micro_batch(weight, is_first=is_first)
    for name, value in grads.items():
        group.accumulate(NUMBERS[name], torch.full(SHAPES[name], value))
    group.complete()
    return {name: part.clone() for name, number in NUMBERS.items() for part in group.parts(number)}


def main_grads(group: ParameterGroup) -> dict[str, set[float]]:
    """Returns the distinct elements of each parameter's main grad, once the reductions are done."""
    for buffer in group.buffers:
        buffer.gradient.reduce()
    for buffer in group.buffers:
        buffer.gradient.finish_reduction(is_last=True)
    found = {}
    for buffer in group.buffers:
        buffer.gradient.complete()
        for slot in buffer.layout.slots:
            found[slot.spec.name] = set(buffer.gradient.main_grad[slot.start : slot.stop].tolist())
        padding = torch.ones(buffer.layout.numel, dtype=torch.bool)
        for start, stop in buffer.layout.extents:
            padding[start:stop] = False
        assert not buffer.gradient.main_grad[padding].any(), "padding is zero, so it adds nothing to a norm"
    return found


@pytest.mark.parametrize("kind", ["accumulated", "exchanged"])
def test_gradients_are_taken_in_any_order_and_missing_ones_are_zero(kind: str) -> None:
    group = make_group(kind)
    assert list(group.trained) == sorted(NUMBERS, key=lambda name: NUMBERS[name]), "in the order of backward"
    group.begin_micro_batch(ONE, is_first=True)
    assert (group.num_missing, group.is_complete) == (3, False)
    for left, name, value in ((2, "v", 2.0), (1, "b", 3.0), (0, "w", 1.0)):
        group.accumulate(NUMBERS[name], torch.full(SHAPES[name], value))
        assert group.num_missing == left
        group.take_waiting()
        (part,) = group.parts(NUMBERS[name])
        assert (tuple(part.shape), float(part.mean())) == (SHAPES[name], value)
        with pytest.raises(UsageError, match=rf"'{name}' got a second gradient in one micro-batch; .* use_reentrant="):
            group.accumulate(NUMBERS[name], torch.full(SHAPES[name], 5.0))
        assert group.num_missing == left
    assert not group.is_complete, "until it is completed"
    group.complete()
    assert group.is_complete
    assert main_grads(group) == {"w": {1.0}, "v": {2.0}, "b": {3.0}}, "the second ones are not in the sum"
    # the buffers hold the gradients of the step before
    grads = micro_batch(group, {"w": 7.0})
    assert not grads["v"].any()
    assert not grads["b"].any()
    assert main_grads(group) == {"w": {7.0}, "v": {0.0}, "b": {0.0}}


@pytest.mark.parametrize(
    ("limit", "calls"), [(1, [["v"], ["w"], ["b"]]), (5, [["v", "w"], ["b"]]), (99, [["v", "w", "b"]])]
)
def test_small_gradients_are_taken_together(
    limit: int, calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "_MAX_WAITING", limit)
    group, names, taken = make_group("accumulated"), {number: name for name, number in NUMBERS.items()}, []
    listener = mock.Mock()
    listener.gradients_taken = lambda _, grads: taken.append([names[number] for number, _ in grads])
    group.install_hooks(listener)
    for step in (1, 2):  # the second one begins with a backward that was not finished
        group.begin_micro_batch(ONE, is_first=True)
        group.accumulate(NUMBERS["b"], torch.full(SHAPES["b"], 9.0))
        taken.clear()
        group.begin_micro_batch(ONE, is_first=True)
        for name in ("v", "w", "b"):
            group.accumulate(NUMBERS[name], torch.full(SHAPES[name], float(step)))
        assert taken == calls
        group.complete()
        assert taken == calls
        assert main_grads(group) == {name: {float(step)} for name in SHAPES}


def test_a_check_keeps_no_unsharded_weight() -> None:
    (layout,) = flat_layouts("unit", [ParamSpec("w", SHAPES["w"], torch.float32)], 1)
    views, flat = ParameterViews(layout, {"w": nn.Parameter(torch.zeros(SHAPES["w"]))}), torch.zeros(layout.numel)
    views.bind([FlatTensor(flat)])
    views.check()
    views.unbind()
    kept = weakref.ref(flat.untyped_storage())
    del flat
    assert kept() is None
    views.check()
    views.parameters["w"].data = torch.zeros(SHAPES["w"])
    with pytest.raises(ContractError, match="'w' no longer lies in its flat buffer"):
        views.check()


def test_the_first_micro_batch_of_a_step_overwrites_and_later_ones_add() -> None:
    group = make_group("accumulated")
    for _ in range(2):  # the second step is as the first, whose main grads were NaN
        micro_batch(group, {"w": 1.0, "v": 1.0, "b": 1.0}, THREE)
        micro_batch(group, {"w": 2.0, "b": 5.0}, is_first=False)  # `v` is missing, and keeps its sum
        assert main_grads(group) == {"w": {5.0}, "v": {3.0}, "b": {8.0}}


def test_an_exchanged_gradient_is_sent_without_its_weight() -> None:
    """A product would be rounded to the reduce dtype; the owner applies the weight."""
    group = make_group("exchanged")
    assert set(micro_batch(group, {"w": 1.0}, THREE)["w"].view(-1).tolist()) == {1.0}


def test_gradients_of_1024_ranks_are_received_as_one_tensor() -> None:
    """The same operations fill, send and receive the gradient of a micro-batch of any number of ranks."""
    counts = []
    for ranks in (2, 1024):
        with sent_gradient(ranks) as work:
            for one in work:  # the first buffer is cut
                one()
            counts.append([operations_of(one) for one in work])
    assert counts[0] == counts[1]


@pytest.mark.parametrize(("world_size", "gap"), [(1, 0), (1, 64), (2, 64), (3, 0), (5, 64)])
def test_parameters_are_cut_where_a_gap_is(world_size: int, gap: int) -> None:
    shapes = {"a": (700, 3), "none": (0, 4), "b": (5,), "c": (4000,), "d": (2, 2)}
    specs = [ParamSpec(name, shape, torch.float32, int(name == "c")) for name, shape in shapes.items()]
    (layout,) = flat_layouts("unit", specs, world_size)
    flat = torch.arange(1.0, layout.numel + 1)
    rows = torch.zeros(world_size, layout.shard_numel + gap)
    rows[:, : layout.shard_numel] = flat.view(world_size, -1)
    parts = slot_parts(rows.view(-1), layout, gap)
    assert len(parts) == len(layout.slots)
    for slot, found in zip(layout.slots, parts, strict=True):
        crossed = (max(slot.stop - 1, slot.start) // layout.shard_numel) - slot.start // layout.shard_numel
        assert len(found) == 1 + (crossed if gap else 0)
        assert len(found) > 1 or found[0].shape == slot.spec.shape
        assert torch.equal(torch.cat([part.reshape(-1) for part in found]), flat[slot.start : slot.stop])
        for part in found:
            part.fill_(0)
    assert not (rows[:, layout.shard_numel :]).any(), "nothing lies in the gaps"
    gaps = torch.ones(layout.numel, dtype=torch.bool)
    for start, stop in layout.extents:
        gaps[start:stop] = False
    assert torch.equal(rows[:, : layout.shard_numel].reshape(-1), flat * gaps), "no other element was touched"
    (layout,) = flat_layouts("unit", [ParamSpec("none", (0, 4), torch.float32)], 2)
    ((part,),) = slot_parts(torch.zeros(2 * gap), layout, gap)
    assert part.shape == (0, 4), "alone in a buffer"


def reducer_of(names: str, first: dict[int, int], weights: Tensor | None = None) -> tuple[list[str], GradientReducer]:
    """Returns a reducer of groups of one flat buffer, and when their reductions start and finish.

    Its exchange demands that reductions are finished before others start: ``first`` has the numbers of both.
    """
    events: list[str] = []
    started = itertools.count()

    def group(name: str) -> Any:
        def finish(is_last: bool) -> Tensor | None:
            events.append(f"finish {name}")
            return weights

        gradient = mock.Mock(finish_reduction=finish)
        gradient.reduce.side_effect = lambda: events.append(f"start {name}")
        gradient.start_gather.side_effect = lambda: events.append(f"gather {name}")
        made = mock.Mock(num_trained=0, is_complete=False, buffers=[mock.Mock(gradient=gradient)])
        made.begin_micro_batch.side_effect = lambda *_, **__: setattr(made, "is_complete", False)
        made.complete.side_effect = lambda: setattr(made, "is_complete", True)
        return made

    exchange = mock.Mock(finish_first=lambda: first.get(next(started), -1))
    return events, GradientReducer([group(name) for name in names], exchange)


def reduced(first: dict[int, int], names: str) -> tuple[list[str], GradientReducer]:
    events, reducer = reducer_of(names, first)
    reducer.begin_micro_batch(ONE, number=0, last=True)
    reducer.end_micro_batch()
    return events, reducer


def test_reductions_finish_in_the_order_in_which_they_started() -> None:
    events, reducer = reduced({}, "abc")
    assert events == ["start a", "start b", "start c"]
    reducer.finish()
    assert events[3:6] == ["finish a", "finish b", "finish c"]
    assert events[6:] == ["gather a", "gather b", "gather c"]
    reducer.finish()
    assert len(events) == 9, "each once"


def test_what_must_be_finished_first_is_finished_and_no_more() -> None:
    events, reducer = reduced({2: 0, 3: 0, 4: 2}, "abcde")
    assert events == [
        *("start a", "start b"),
        *("finish a", "start c"),  # c waits for number 0
        "start d",  # which is finished already
        *("finish b", "finish c", "start e"),  # e waits for all up to number 2
    ]
    reducer.finish()
    assert events[8:10] == ["finish d", "finish e"]
    # a wait for what has not started ends
    assert reduced({1: 5}, "ab")[0] == ["start a", "finish a", "start b"]


def test_numbers_go_on_over_micro_batches_and_weights_are_taken_once_each() -> None:
    weights = torch.tensor([1.0, 5.0])
    # the second gradient of the second micro-batch waits for the first micro-batch
    events, reducer = reducer_of("ab", {3: 1}, weights)
    for number in range(2):
        reducer.begin_micro_batch(ONE, number=number, last=number == 1)
        reducer.end_micro_batch()
        weights += 1
    assert events == ["start a", "start b", "start a", "finish a", "finish b", "start b"]
    reducer.finish()
    assert len(reducer.step.weights) == 2, "of two micro-batches"
    reducer.begin_micro_batch(ONE, number=0, last=True)
    assert reducer.step.weights == [], "of the new step"
