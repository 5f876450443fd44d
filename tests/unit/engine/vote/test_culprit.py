"""The culprit of a failed step: the search in the main grads, the gradient monitor, and the choice among findings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dtrain.distributed.single_rank import SingleRank
from dtrain.engine.outcome import Culprit
from dtrain.engine.vote.culprit import Finding, find_nonfinite, gather_findings, locate_bad_gradient, locate_bad_loss
from dtrain.engine.vote.decide import DecodedDecision
from dtrain.parameters.gradient_monitor import GradientMonitor
from dtrain.sharding.layout import CHUNK, FlatLayout, ParamSpec, ShardInterval, flat_layouts
from tests.helpers.vote_records import decoded, rank_records


def decision(*ranks: dict[str, Any]) -> DecodedDecision:
    return decoded("overflow", 1.0, 1.0, [rank_records(step=3, **values) for values in ranks])


def layout(group: str, world: int = 2) -> FlatLayout:
    """Two tensors; the second, of 1,500 elements, lies on both of two ranks."""
    specs = [
        ParamSpec(f"{group}.a", (10, 5), torch.float32, 0),
        ParamSpec(f"{group}.b", (30, 50), torch.float32, 0),
    ]
    (found,) = flat_layouts(group, specs, world)
    return found


# -- the search --------------------------------------------------------------------------------------------------------


def findings(values: dict[int, float]) -> list[Finding]:
    """Findings of two ranks in a buffer with these elements; all others, padding too, are 1."""
    flat_layout = layout("x")
    flat = torch.ones(flat_layout.numel)
    for index, value in values.items():
        flat[index] = value
    return [
        found
        for rank in range(2)
        for interval in flat_layout.intervals(*flat_layout.shard(rank))
        for found in find_nonfinite(
            interval.spec.name, rank, interval.start, values_of(flat_layout, rank, flat, interval)
        )
    ]


def values_of(flat_layout: FlatLayout, rank: int, flat: torch.Tensor, interval: ShardInterval) -> torch.Tensor:
    """The elements of ``interval``, whose offset counts from the start of the rank's shard."""
    start = flat_layout.shard(rank)[0] + interval.offset
    return flat[start : start + interval.stop - interval.start]


def test_a_clean_buffer_has_no_findings() -> None:
    assert findings({0: 3e38}) == []


@pytest.mark.parametrize("index", [0, 49])
def test_one_element_of_the_first_tensor(index: int) -> None:
    assert findings({index: math.nan}) == [Finding("x.a", 0, index, index + 1, 0, 1)]


def test_a_tensor_on_two_ranks_counts_in_its_own_elements() -> None:
    start = layout("x").slots[1].start
    assert start == 64
    values = {start: math.inf, CHUNK - 1: math.nan, CHUNK: -math.inf, start + 1499: math.nan}
    assert findings(values) == [
        Finding("x.b", 0, 0, CHUNK - start, 1, 1),
        Finding("x.b", 1, CHUNK - start, 1500, 1, 1),
    ]


def test_padding_is_nobodys_gradient() -> None:
    assert findings({50: math.nan, 63: math.inf, 64 + 1500: math.nan}) == []


def test_findings_travel_as_they_are() -> None:
    own = findings({0: math.inf, CHUNK: math.nan})
    assert gather_findings(SingleRank(torch.device("cpu")), own) == own
    assert len(own) == 2


# -- the gradient monitor ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_monitor_finds_one_bad_element(dtype: torch.dtype, value: float) -> None:
    monitor = GradientMonitor(3)
    grad = torch.full((5000,), 100.0, dtype=dtype)  # as FP16, its sum would overflow
    monitor.record_finiteness(0, 2, grad)
    bad_grad = grad.clone()
    bad_grad[-1] = value
    for number, recorded in enumerate([grad, bad_grad, grad]):
        monitor.record_finiteness(1, number, recorded)
    numbers, bad = monitor.finiteness()
    assert list(numbers) == [2, 3, 4, 5]
    assert bad is not None
    assert bad.tolist() == [False, False, True, False]
    monitor.clear()
    assert monitor.finiteness() == ([], None)


def test_monitor_keeps_numbers_and_sums_together_over_dtypes() -> None:
    monitor = GradientMonitor(2)
    good, bad = torch.ones(4), torch.tensor([1.0, math.nan])
    monitor.record_finiteness(0, 0, good.bfloat16())
    monitor.record_finiteness(0, 1, bad)
    monitor.record_finiteness(1, 0, bad.bfloat16())
    monitor.record_finiteness(1, 1, good)
    numbers, marks = monitor.finiteness()
    assert marks is not None
    assert dict(zip(numbers, marks.tolist(), strict=True)) == {0: False, 1: True, 2: True, 3: False}


# -- the culprit -------------------------------------------------------------------------------------------------------


def test_bad_loss_is_the_earliest_micro_batch_then_the_lowest_rank() -> None:
    bad = {"num_bad_losses": 2, "bad_micro_batch": 1, "bad_loss": math.nan}
    got = locate_bad_loss(decision({}, bad, {**bad, "num_bad_losses": 1, "bad_loss": -math.inf}, {}))
    assert got == Culprit(1, 3, "forward loss", 1, num_nan=1, num_bad_losses=3)
    infinite = {**bad, "bad_micro_batch": 0, "bad_loss": -math.inf}
    assert locate_bad_loss(decision(bad, infinite)) == Culprit(1, 3, "forward loss", 0, num_inf=1, num_bad_losses=4)


ORDER = ["b.b", "b.a", "a.b", "a.a"]  # b is the later module


def culprit_of(*ranks: dict[str, Any], found: list[Finding], is_only_backward: bool = False) -> Culprit:
    return locate_bad_gradient(decision(*ranks), found, ORDER, is_only_backward=is_only_backward)


def test_bad_gradient_is_the_first_by_micro_batch_then_backward_then_rank() -> None:
    found = [Finding(name, rank, 0, 9, 1, 2) for rank in (0, 1) for name in ORDER]
    second = 4 * 1 + 3  # micro-batch 1, a.a
    got = culprit_of({"bad_gradient": second + 1}, {"bad_gradient": second}, {}, found=found)
    assert got == Culprit(1, 3, "local gradient", 1, "a.a", 0, 9, 2, 4)
    assert culprit_of({"bad_gradient": 8}, {"bad_gradient": 8}, found=found).tensor == "b.b"
    assert culprit_of({"bad_gradient": 8}, {"bad_gradient": 8}, found=found).rank == 0


def test_culprit_rank_and_tensor_belong_together() -> None:
    """Rank 0 breaks b.a, rank 1 the later b.b in the same micro-batch: b.b comes first in backward."""
    found = [Finding("b.a", 0, 0, 1, 0, 1), Finding("b.b", 1, 4, 5, 1, 0)]
    got = culprit_of({"bad_gradient": 1}, {"bad_gradient": 0}, found=found)
    assert (got.rank, got.tensor, got.start) == (1, "b.b", 4)


def test_findings_on_several_ranks_become_one_interval() -> None:
    found = [Finding("b.b", 0, 40, 960, 3, 0), Finding("a.a", 0, 0, 1, 0, 1), Finding("b.b", 1, 960, 1000, 0, 4)]
    got = culprit_of({}, {"bad_gradient": 0}, found=found)
    assert (got.tensor, got.start, got.stop, got.num_inf, got.num_nan) == ("b.b", 40, 1000, 3, 4)


def test_overflow_of_a_reduced_gradient_names_its_owner() -> None:
    got = culprit_of({}, {}, found=[Finding("a.b", 1, 970, 971, 1, 0)])
    assert got == Culprit(1, 3, "reduced gradient", None, "a.b", 970, 971, 1, 0)


def test_overflow_of_the_norm_names_no_rank() -> None:
    assert culprit_of({}, {}, found=[]) == Culprit(-1, 3, "reduced gradient")


def test_a_rank_whose_finite_gradient_sums_to_inf_is_not_blamed() -> None:
    got = culprit_of({}, {"bad_gradient": 0}, found=[Finding("a.a", 0, 1, 2, 1, 0)])
    assert (got.phase, got.rank, got.micro_batch, got.tensor) == ("reduced gradient", 0, None, "a.a")
    got = culprit_of({"bad_gradient": 3}, {"bad_gradient": 0}, found=[Finding("a.a", 0, 1, 2, 1, 0)])
    assert (got.phase, got.rank, got.micro_batch, got.tensor) == ("local gradient", 0, 0, "a.a")


def test_only_backward_is_the_culprit_without_a_record() -> None:
    got = culprit_of({}, found=[Finding("a.a", 0, 1, 2, 1, 0)], is_only_backward=True)
    assert (got.phase, got.rank, got.micro_batch, got.tensor) == ("local gradient", 0, 0, "a.a")


@pytest.mark.parametrize(
    ("culprit", "text"),
    [
        (
            Culprit(1, 3, "forward loss", 2, num_nan=1, num_bad_losses=4),
            "forward loss is NaN on rank 1, micro-batch 2 (losses of this step that are not finite: 4)",
        ),
        (
            Culprit(0, 3, "forward loss", 0, num_inf=1, num_bad_losses=1),
            "forward loss is Inf on rank 0, micro-batch 0 (losses of this step that are not finite: 1)",
        ),
        (
            Culprit(2, 3, "local gradient", 0, "head.weight", 7, 9, 1, 1),
            "local gradient of 'head.weight'[7:9] not finite (1 Inf, 1 NaN) on rank 2, micro-batch 0",
        ),
        (
            Culprit(2, 3, "reduced gradient", None, "head.weight", 7, 8, 1, 0),
            "reduced gradient of 'head.weight'[7:8] not finite (1 Inf); owner of the shard: rank 2",
        ),
        (
            Culprit(-1, 3, "reduced gradient"),
            "reduced gradient: every element is finite, but the norm after clipping is above 9.2e+18 (under deepspeed: "
            "that of the main grads above 9.2e+18 / sqrt(ranks))",
        ),
    ],
)
def test_culprit_as_text(culprit: Culprit, text: str) -> None:
    assert str(culprit) == text
