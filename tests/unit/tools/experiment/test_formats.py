"""BF16, FP16 and FP8 against FP32's noise."""

from __future__ import annotations

from math import hypot
from statistics import fmean, stdev

import pytest

from dtrain.tools.experiment.formats import (
    DETECTION_LIMIT,
    PRECISIONS,
    FormatLosses,
    FormatsResult,
    NetworkComparison,
    finding,
    run,
)
from dtrain.tools.experiment.networks import convnet, regression


def test_gaps_are_in_units_of_seed_and_rounding_noise() -> None:
    item = NetworkComparison("any", 1, [1.0, 3.0], [1.0, 1.6], [FormatLosses("bf16", [2.0, 3.0], 0)])
    assert item.unit == hypot(stdev([1.0, 3.0]), stdev([1.0, 1.0, 1.6]))
    assert item.gaps("bf16") == [1.0 / item.unit, 0.0]


@pytest.fixture(scope="module")
def result() -> FormatsResult:
    """20 and 40 steps of two networks with seeds 0, 1 and 2."""
    return run([(convnet(), 20), (regression(), 40)], seeds=(0, 1, 2))


def test_no_format_can_be_told_from_noise(result: FormatsResult) -> None:
    for item in result.networks:
        assert item.unit > 0
        for precision in PRECISIONS:
            assert abs(fmean(item.gaps(precision))) < DETECTION_LIMIT, (item.network, precision)
    assert finding(result).startswith("No format can be told")


def test_formats_do_compute_differently(result: FormatsResult) -> None:
    for item in result.networks:
        finals = [item.fp32, *(found.losses for found in item.formats)]
        assert len({tuple(losses) for losses in finals}) == 1 + len(PRECISIONS)
        assert item.rounding_noise > 0


def test_a_worse_format_is_told_from_noise() -> None:
    worse = [FormatLosses(name, [5.0, 6.0] if name == "fp8" else [1.0, 2.0], 0) for name in PRECISIONS]
    item = NetworkComparison("any", 1, [1.0, 2.0], [1.0], worse)
    assert finding(FormatsResult([0, 1], [item])).startswith(
        "Outside FP32's own noise: FP8 on the any (+6 units); every other"
    )
