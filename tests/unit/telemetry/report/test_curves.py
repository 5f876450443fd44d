from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.telemetry.report.curves import Curve, chart, number, thin

numbers = st.floats(-1e6, 1e6)


@given(st.lists(numbers, min_size=1, max_size=400), st.integers(1, 40))
def test_the_extremes_of_each_column_remain(values: list[float], columns: int) -> None:
    steps = [float(step) for step in range(len(values))]
    kept = thin(steps, values, 0.0, steps[-1], columns)
    assert set(kept) <= set(zip(steps, values, strict=True))
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})
    assert len(kept) <= max(4 * columns, 2 * columns)
    assert (kept[0], kept[-1]) == ((steps[0], values[0]), (steps[-1], values[-1]))
    assert {min(values), max(values)} <= {value for _, value in kept}


@given(st.dictionaries(st.integers(0, 10**6), numbers, min_size=1, max_size=50), st.booleans())
def test_any_finite_curve_is_drawn(values: dict[int, float], log: bool) -> None:
    points = sorted(values.items())
    svg = chart("x", [Curve("c", 0, [s for s, _ in points], [v for _, v in points])], log=log, marks=[3])
    drawable = [value for _, value in points if value > 0 or not log]
    assert bool(svg) == bool(drawable)
    assert "nan" not in svg
    assert "inf" not in svg


def test_no_points_are_no_chart() -> None:
    assert chart("x", []) == chart("x", [Curve("c", 0, [], [])]) == ""


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ((0.5, 3.1), ["1", "2", "3"]),
        ((0.07, 1.2), ["0.1", "0.2", "0.5", "1"]),
        ((1e-4, 1e3), ["0.0001", "0.01", "1", "100"]),
    ],
)
def test_ticks_of_a_logarithmic_axis_are_round(values: tuple[float, float], ticks: list[str]) -> None:
    svg = chart("x", [Curve("c", 0, [1, 2], values)], log=True)
    assert re.findall(r'text-anchor="end">([^<]*)<', svg) == ticks


def test_numbers() -> None:
    assert [number(value) for value in (0, 0.00012, 1.23456, 12345.0, 2.5e6, 1e-9)] == [
        "0", "0.00012", "1.235", "12.35k", "2.5M", "1e-09",
    ]  # fmt: skip
    assert number(math.pi * 1e9) == "3.142G"
