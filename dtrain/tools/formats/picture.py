"""Plots the rounding errors and the ranges of the formats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from dtrain.precision.formats import FORMATS, LEAST_GRADIENT, FloatFormat
from dtrain.tools.format_styles import GREY, STYLES

_EXPONENTS = range(-152, 132)
_LOST = 1.0  # relative error of a number rounded to 0
_TOP = 30.0  # height at which an error of Inf is drawn


def draw(path: Path) -> None:
    figure = Figure(figsize=(9, 7.2), dpi=110, layout="constrained")
    errors, ranges = figure.subplots(2, 1, sharex=True, height_ratios=(5, 2.4))
    _draw_errors(errors)
    _draw_ranges(ranges)
    for axes in (errors, ranges):
        axes.set_xscale("log")
        axes.set_xlim(1e-47, 1e41)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        axes.axvline(LEAST_GRADIENT, color=GREY, linewidth=1.2, linestyle=":")
        axes.axvline(9e4, color=GREY, linewidth=1.2, linestyle=":")
    ranges.set_xlabel("magnitude of the number")
    ranges.xaxis.set_major_locator(LogLocator(numticks=10))
    ranges.xaxis.set_minor_locator(NullLocator())
    figure.legend(loc="outside upper center", ncols=6, fontsize=9, frameon=False)
    errors.set_title("Mantissa bits set how exact a format is, exponent bits how far it reaches", fontsize=12)
    figure.savefig(path)


def worst_errors(floats: FloatFormat, exponents: Sequence[int] = _EXPONENTS) -> tuple[list[float], list[float]]:
    """Returns the starts of the binades [2^e, 2^(e + 1)) and the largest relative error in each.

    The error is Inf if the number overflows to Inf.
    """
    points = [_worst(floats, exponent) for exponent in exponents]
    return [math.ldexp(1.0, exponent) for exponent in exponents], points


def _worst(floats: FloatFormat, exponent: int) -> float:
    # the worst number is half a unit above the power of two, or the power of two if that is outside the binade
    start = Fraction(2) ** exponent
    half_step = Fraction(2) ** (max(exponent, floats.min_exponent) - floats.mantissa_bits - 1)
    number = start + half_step if half_step < start else start
    value = floats.rounded(number).value
    return float(abs(Fraction(value) - number) / number) if math.isfinite(value) else math.inf


def _draw_errors(axes: Axes) -> None:
    axes.set_yscale("log")
    for floats, (color, dash, width) in STYLES.items():
        starts, errors = worst_errors(floats)
        heights = [min(error, _TOP) for error in errors]
        axes.step(starts, heights, dash, where="post", color=color, linewidth=width, label=floats.name)
    axes.axhline(_LOST, color="black", linewidth=0.8)
    axes.set_ylim(2e-8, _TOP)
    axes.set_ylabel("relative error of rounding, worst case")
    axes.text(3e-46, 1.4, "at 1 the number is lost", fontsize=9)
    axes.text(3e-46, 11, "at the top it is Inf", fontsize=9)
    note: dict[str, Any] = {"fontsize": 9, "backgroundcolor": "white", "va": "center"}
    axes.text(LEAST_GRADIENT / 4, 2e-6, "gradients down to\n$2^{-27}$ mattered", ha="right", **note)
    axes.text(3.6e5, 2e-6, "300 x 300 = 90,000", **note)


def _draw_ranges(axes: Axes) -> None:
    order = FORMATS[::-1]
    for row, floats in enumerate(order):
        color, *_ = STYLES[floats]
        for start, stop, alpha in (
            (floats.min_subnormal, floats.min_normal, 0.4),
            (floats.min_normal, floats.max, 1.0),
        ):
            axes.barh(row, stop - start, left=start, height=0.62, color=color, alpha=alpha)
        if floats.max < 1e6:  # the bar is too short for the label
            axes.text(1e6, row, f"{floats.min_subnormal:.2g} to {floats.max:,.0f}", va="center", fontsize=9)
        else:
            span = f"{floats.min_subnormal:.2g} to {floats.max:.3g}"
            axes.text(1e22, row, span, va="center", ha="center", fontsize=9, color="white", weight="bold")
    axes.set_yticks(range(len(order)), [floats.name for floats in order])
    axes.set_ylabel("range\n(pale: subnormal)")
