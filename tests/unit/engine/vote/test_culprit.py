"""The culprit of a failed step: the search in the main grads, the gradient monitor, and the culprit as text.

``tests/faults/test_vote_processes.py`` has the choice among findings.
"""

from __future__ import annotations

import math

import pytest
import torch

from dtrain.engine.outcome import Culprit
from dtrain.engine.vote.culprit import Finding, find_nonfinite
from dtrain.parameters.gradient_monitor import GradientMonitor
from dtrain.sharding.layout import CHUNK, ParamSpec, flat_layouts

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
    cut = CHUNK - start
    assert found == [Finding("a", 0, 0, 50, 0, 2), Finding("b", 0, 0, cut, 1, 1), Finding("b", 1, cut, 1500, 1, 1)]


# -- the gradient monitor ----------------------------------------------------------------------------------------------


def test_monitor_keeps_numbers_and_sums_together_over_dtypes() -> None:
    monitor = GradientMonitor(2)
    good, bad = torch.ones(4), torch.tensor([1.0, math.nan])
    for micro_batch, number, grad in ((0, 0, good.bfloat16()), (0, 1, bad), (1, 0, bad.bfloat16()), (1, 1, good)):
        monitor.record_finiteness(micro_batch, number, grad)
    numbers, marks = monitor.finiteness()
    assert marks is not None
    assert dict(zip(numbers, marks.tolist(), strict=True)) == {0: False, 1: True, 2: True, 3: False}
    monitor.clear()
    assert monitor.finiteness() == ([], None)


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


# -- the culprit -------------------------------------------------------------------------------------------------------

LOCAL, REDUCED = "local gradient", "reduced gradient"


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
