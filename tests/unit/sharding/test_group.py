"""A parameter group's gradients in one micro-batch, and the queue of their reductions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtrain.distributed.communicator import GradientSend
from dtrain.distributed.single_rank import SingleRank
from dtrain.errors import UsageError
from dtrain.parameters.micro_batch_weight import Weight
from dtrain.sharding.accumulate import RunningSum
from dtrain.sharding.gradients import AccumulatedGradient, ExchangedGradient, FlatGradient, ReductionQueue
from dtrain.sharding.group import FlatBuffer, ParameterGroup
from dtrain.sharding.layout import FlatLayout, ParamSpec, flat_layouts
from dtrain.sharding.placement import STAGES, Placement
from dtrain.sharding.replicas import ParameterViews, Replica
from dtrain.sharding.storage_pool import StoragePool

COMM = SingleRank(torch.device("cpu"))
ONE = Weight(torch.ones(()), is_one=True)
THREE = Weight(torch.tensor(3.0))
SHAPES = {"w": (3, 2), "v": (4,), "b": (2,)}


def make_group(kind: str) -> ParameterGroup:
    """Returns a group of three parameters, `b` alone in its flat buffer; the main grads are NaN where they may be."""
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    specs = [ParamSpec(name, SHAPES[name], torch.bfloat16, True) for name in ("w", "v")]
    specs.append(ParamSpec("b", SHAPES["b"], torch.float32, False))
    layouts = flat_layouts("unit", specs, 1)
    sends = [GradientSend(layout.name, layout.numel, torch.float32, layout.extents) for layout in layouts]
    exchange = COMM.gradient_exchange(sends, 0)
    exchange.begin(ONE.value)

    def gradient(number: int, layout: FlatLayout) -> FlatGradient:
        segment, grad = Placement.SHARD.segment(layout, 0), torch.zeros(layout.numel)
        for start, stop in layout.extents:
            grad[start:stop] = torch.nan
        if kind == "accumulated":
            return AccumulatedGradient(segment, COMM, grad, torch.float32, 0)
        return ExchangedGradient(segment, COMM, grad, exchange, number, RunningSum)

    def buffer(number: int, layout: FlatLayout) -> FlatBuffer:
        replica = Replica(layout, ParameterViews(layout, parameters), COMM, STAGES[2], StoragePool(COMM.device))
        segment = Placement.SHARD.segment(layout, 0)
        return FlatBuffer(segment, replica, torch.zeros(layout.numel), {}, gradient(number, layout))

    return ParameterGroup("unit", [buffer(number, layout) for number, layout in enumerate(layouts)], ())


def micro_batch(
    group: ParameterGroup, grads: dict[int, float], weight: Weight = ONE, *, is_first: bool = True
) -> list[list[Tensor]]:
    group.begin_micro_batch(weight, is_first=is_first)
    for number, value in grads.items():
        group.accumulate(number, torch.full(tuple(SHAPES.values())[number], value))
    return [[view.clone() for view in views] for views in group.complete()]


def main_grads(group: ParameterGroup) -> dict[str, set[float]]:
    """Returns the distinct elements of each parameter's main grad, once the reductions are done."""
    queue = ReductionQueue(len(group.buffers), None)
    group.reduce(queue)
    queue.finish()
    found = {}
    for buffer in group.buffers:
        buffer.gradient.start_gather()
        for slot in buffer.layout.slots:
            found[slot.spec.name] = set(buffer.gradient.main_grad[slot.start : slot.stop].tolist())
        padding = torch.ones(buffer.layout.numel, dtype=torch.bool)
        for start, stop in buffer.layout.extents:
            padding[start:stop] = False
        assert not buffer.gradient.main_grad[padding].any(), "padding is zero, so it adds nothing to a norm"
    return found


KINDS = pytest.mark.parametrize("kind", ["accumulated", "exchanged"])


@KINDS
def test_gradients_are_taken_in_any_order(kind: str) -> None:
    group = make_group(kind)
    group.begin_micro_batch(ONE, is_first=True)
    assert (group.num_missing, group.is_complete) == (3, False)
    for left, number in ((2, 1), (1, 2), (0, 0)):
        group.accumulate(number, torch.full(tuple(SHAPES.values())[number], 1.0 + number))
        assert group.num_missing == left
    assert not group.is_complete, "until it is completed"
    (first, second), (third,) = group.complete()
    assert group.is_complete
    assert [(tuple(view.shape), float(view.mean())) for view in (first, second, third)] == [
        ((3, 2), 1.0),
        ((4,), 2.0),
        ((2,), 3.0),
    ]
    assert main_grads(group) == {"w": {1.0}, "v": {2.0}, "b": {3.0}}


@KINDS
def test_a_second_gradient_in_a_micro_batch_is_refused(kind: str) -> None:
    group = make_group(kind)
    group.begin_micro_batch(ONE, is_first=True)
    group.accumulate(1, torch.ones(4))
    with pytest.raises(UsageError, match=r"'v' got a second gradient in one micro-batch; .* use_reentrant=False"):
        group.accumulate(1, torch.full((4,), 5.0))
    assert group.num_missing == 2
    list(group.complete())
    assert main_grads(group)["v"] == {1.0}, "the second one is not in the sum"


@KINDS
def test_missing_gradients_are_zero(kind: str) -> None:
    group = make_group(kind)
    micro_batch(group, {0: 1.0, 1: 2.0, 2: 3.0})
    assert main_grads(group) == {"w": {1.0}, "v": {2.0}, "b": {3.0}}
    # the buffers hold the gradients of the step before
    (_, missing), (alone,) = micro_batch(group, {0: 7.0})
    assert not missing.any()
    assert not alone.any()
    assert main_grads(group) == {"w": {7.0}, "v": {0.0}, "b": {0.0}}


def test_the_first_micro_batch_of_a_step_overwrites_and_later_ones_add() -> None:
    group = make_group("accumulated")
    for _ in range(2):  # the second step is as the first, whose main grads were NaN
        micro_batch(group, {0: 1.0, 1: 1.0, 2: 1.0}, THREE)
        micro_batch(group, {0: 2.0, 2: 5.0}, is_first=False)  # `v` is missing, and keeps its sum
        assert main_grads(group) == {"w": {5.0}, "v": {3.0}, "b": {8.0}}


def test_an_exchanged_gradient_is_sent_without_its_weight() -> None:
    """A product would be rounded to the reduce dtype; the owner applies the weight."""
    group = make_group("exchanged")
    (first, _), _ = micro_batch(group, {0: 1.0}, THREE)
    assert set(first.view(-1).tolist()) == {1.0}


# -- the queue ---------------------------------------------------------------------------------------------------------


class FakeGradient:
    """Records when its reductions start and finish."""

    def __init__(self, name: str, events: list[str], first: dict[int, int], weights: Tensor | None = None) -> None:
        self._name, self._events, self._first, self._weights = name, events, first, weights

    def finish_first(self, number: int) -> int:
        return self._first.get(number, -1)

    def reduce(self) -> None:
        self._events.append(f"start {self._name}")

    def finish_reduction(self) -> Tensor | None:
        self._events.append(f"finish {self._name}")
        return self._weights


def queued(first: dict[int, int], names: str) -> tuple[list[str], ReductionQueue]:
    events: list[str] = []
    queue = ReductionQueue(len(names), None)
    for name in names:
        gradient: Any = FakeGradient(name, events, first)
        queue.start(gradient)
    return events, queue


def test_reductions_finish_in_the_order_in_which_they_started() -> None:
    events, queue = queued({}, "abc")
    assert events == ["start a", "start b", "start c"]
    queue.finish()
    assert events[3:] == ["finish a", "finish b", "finish c"]
    queue.finish()
    assert len(events) == 6, "each once"


def test_what_must_be_finished_first_is_finished_and_no_more() -> None:
    events, queue = queued({2: 0, 3: 0, 4: 2}, "abcde")
    assert events == [
        *("start a", "start b"),
        *("finish a", "start c"),  # c waits for number 0
        "start d",  # which is finished already
        *("finish b", "finish c", "start e"),  # e waits for all up to number 2
    ]
    queue.finish()
    assert events[-2:] == ["finish d", "finish e"]


def test_a_wait_for_what_has_not_started_ends() -> None:
    events, _ = queued({1: 5}, "ab")
    assert events == ["start a", "finish a", "start b"]


def test_numbers_go_on_over_micro_batches_and_weights_are_taken_once_each() -> None:
    events: list[str] = []
    queue = ReductionQueue(2, None)
    first = {3: 1}  # the second gradient of the second micro-batch waits for the first micro-batch
    for micro in range(2):
        queue.begin_micro_batch(ONE, is_first=micro == 0)
        for name in "ab":
            gradient: Any = FakeGradient(f"{name}{micro}", events, first, torch.tensor([1.0 + micro, 5.0]))
            queue.start(gradient)
    assert events == ["start a0", "start b0", "start a1", "finish a0", "finish b0", "start b1"]
    queue.finish()
    assert [weights.tolist() for weights in queue.weights] == [[1.0, 5.0], [2.0, 5.0]]
    queue.begin_micro_batch(ONE, is_first=True)
    assert queue.weights == [], "of the new step"
