"""The culprit of a failed step: the search in the main grads, the gradient monitor, and the choice among findings.

``tests/faults/test_vote_trials.py`` has the culprits of random steps.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dtrain.engine.outcome import Culprit
from dtrain.engine.vote.culprit import Finding, find_nonfinite, locate_bad_gradient, locate_bad_loss
from dtrain.engine.vote.decide import DecodedDecision
from dtrain.parameters.gradient_monitor import GradientMonitor
from dtrain.sharding.layout import CHUNK, ParamSpec, flat_layouts
from tests.helpers.vote_records import decoded, rank_records


def decision(*ranks: dict[str, Any]) -> DecodedDecision:
    return decoded("overflow", 1.0, 1.0, [rank_records(step=3, **values) for values in ranks])


# -- the search --------------------------------------------------------------------------------------------------------


def test_a_tensor_on_two_ranks_counts_in_its_own_elements_and_padding_is_nobodys() -> None:
    specs = [ParamSpec("a", (10, 5), torch.float32, 0), ParamSpec("b", (30, 50), torch.float32, 0)]
    (layout,) = flat_layouts("x", specs, 2)
    start = layout.slots[1].start
    assert start == 64
    flat = torch.full((layout.numel,), 3e38)
    flat[50], flat[63], flat[start + 1500] = math.nan, math.inf, math.nan  # padding
    flat[0] = flat[49] = math.nan
    flat[start], flat[CHUNK - 1], flat[CHUNK], flat[start + 1499] = math.inf, math.nan, -math.inf, math.nan
    found = []
    for rank in range(2):
        begin, end = layout.shard(rank)
        for interval in layout.intervals(begin, end):
            values = flat[begin + interval.offset :][: interval.stop - interval.start]
            found += find_nonfinite(interval.spec.name, rank, interval.start, values)
    assert found == [
        Finding("a", 0, 0, 50, 0, 2),
        Finding("b", 0, 0, CHUNK - start, 1, 1),
        Finding("b", 1, CHUNK - start, 1500, 1, 1),
    ]


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
    for micro_batch, number, grad in ((0, 0, good.bfloat16()), (0, 1, bad), (1, 0, bad.bfloat16()), (1, 1, good)):
        monitor.record_finiteness(micro_batch, number, grad)
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
EVERYWHERE = [Finding(name, rank, 0, 9, 1, 2) for rank in (0, 1) for name in ORDER]
LOCAL, REDUCED = "local gradient", "reduced gradient"
CULPRITS: dict[str, tuple[list[int], list[Finding], Culprit]] = {
    # the numbers of the first bad gradient of each rank; micro-batch x 4 + index in ORDER
    "micro-batch before backward": ([8, 7, -1], EVERYWHERE, Culprit(1, 3, LOCAL, 1, "a.a", 0, 9, 2, 4)),
    "then the lowest rank": ([8, 8], EVERYWHERE, Culprit(0, 3, LOCAL, 2, "b.b", 0, 9, 2, 4)),
    "rank and tensor belong together": (
        [1, 0],
        [Finding("b.a", 0, 0, 1, 0, 1), Finding("b.b", 1, 4, 5, 1, 0)],
        Culprit(1, 3, LOCAL, 0, "b.b", 4, 5, 1, 0),
    ),
    "one interval over ranks": (
        [-1, 0],
        [Finding("b.b", 0, 40, 960, 3, 0), Finding("a.a", 0, 0, 1, 0, 1), Finding("b.b", 1, 960, 1000, 0, 4)],
        Culprit(1, 3, LOCAL, 0, "b.b", 40, 1000, 3, 4),
    ),
    "the owner of a sum": ([-1, -1], [Finding("a.b", 1, 7, 8, 1, 0)], Culprit(1, 3, REDUCED, None, "a.b", 7, 8, 1, 0)),
    "nobody for the norm": ([-1, -1], [], Culprit(-1, 3, REDUCED)),
    # the monitor of rank 1 has summed finite elements to an infinity
    "not a rank whose gradient is finite": (
        [-1, 0],
        [Finding("a.a", 0, 1, 2, 1, 0)],
        Culprit(0, 3, REDUCED, None, "a.a", 1, 2, 1, 0),
    ),
    "but the one whose is not": ([3, 0], [Finding("a.a", 0, 1, 2, 1, 0)], Culprit(0, 3, LOCAL, 0, "a.a", 1, 2, 1, 0)),
}


@pytest.mark.parametrize("case", CULPRITS)
def test_culprit_of_a_gradient(case: str) -> None:
    numbers, found, culprit = CULPRITS[case]
    ranks = decision(*({"bad_gradient": number} for number in numbers))
    assert locate_bad_gradient(ranks, found, ORDER, is_only_backward=False) == culprit


def test_only_backward_is_the_culprit_without_a_record() -> None:
    found = [Finding("a.a", 0, 1, 2, 1, 0)]
    want = Culprit(0, 3, LOCAL, 0, "a.a", 1, 2, 1, 0)
    assert locate_bad_gradient(decision({}), found, ORDER, is_only_backward=True) == want


@pytest.mark.parametrize(
    ("culprit", "text"),
    [
        (
            Culprit(1, 3, "forward loss", 2, num_nan=1, num_bad_losses=4),
            "forward loss is NaN on rank 1, micro-batch 2 (losses of this step that are not finite: 4)",
        ),
        (
            Culprit(2, 3, LOCAL, 0, "head.weight", 7, 9, 1, 1),
            "local gradient of 'head.weight'[7:9] not finite (1 Inf, 1 NaN) on rank 2, micro-batch 0",
        ),
        (
            Culprit(2, 3, REDUCED, None, "head.weight", 7, 8, 1, 0),
            "reduced gradient of 'head.weight'[7:8] not finite (1 Inf); owner of the shard: rank 2",
        ),
        (
            Culprit(-1, 3, REDUCED),
            "reduced gradient: every element is finite, but the norm after clipping is above 9.2e+18 (under deepspeed: "
            "that of the main grads above 9.2e+18 / sqrt(ranks))",
        ),
    ],
)
def test_culprit_as_text(culprit: Culprit, text: str) -> None:
    assert str(culprit) == text
