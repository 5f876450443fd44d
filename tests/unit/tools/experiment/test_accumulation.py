"""Errors of dot products keep their bound in every format, and reach it in the worst case."""

from __future__ import annotations

import pytest

from dtrain.precision.formats import BF16, FP16, FP32
from dtrain.tools.experiment.accumulation import MATMUL, SUMS, VECTORS, AccumulationResult, run


@pytest.fixture(scope="module")
def result() -> AccumulationResult:
    """Lengths up to 4,096, 16 trials, seed 0."""
    return run(longest=4096, trials=16)


def test_no_error_exceeds_its_bound(result: AccumulationResult) -> None:
    assert len(result.cases) == len(VECTORS) * (len(SUMS) + 1)
    for case in result.cases:
        assert len(case.errors) == len(case.bounds) == len(result.lengths) == 12
        for error, bound in zip(case.errors, case.bounds, strict=True):
            assert bound is None or error <= bound, case


@pytest.mark.parametrize("floats", SUMS, ids=lambda floats: floats.name)
def test_the_worst_case_reaches_the_bound(result: AccumulationResult, floats: object) -> None:
    case = result.of("worst case", floats.name)  # type: ignore[attr-defined]
    place = result.lengths.index(16)
    bound = case.bounds[place]
    assert bound is not None
    assert 0.8 * bound < case.errors[place] <= bound


def test_sums_in_16_bits_lose_positive_terms(result: AccumulationResult) -> None:
    errors = {floats: result.error("positive", floats.name, 4096) for floats in SUMS}
    assert errors[FP16] > 0.05
    assert errors[BF16] > 0.8
    assert errors[FP32] < 1e-5


def test_a_matmul_of_fp16_tensors_sums_in_fp32(result: AccumulationResult) -> None:
    for length in result.lengths:
        assert result.error("positive", MATMUL, length) <= FP16.unit_roundoff + 1e-5
