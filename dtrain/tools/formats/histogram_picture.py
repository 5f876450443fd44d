"""Draws the exponents of a run's gradients against the ranges of the formats, and their course over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from operator import add
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dtrain.precision.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FloatFormat
from dtrain.precision.histogram import Histogram, share
from dtrain.precision.report import PrecisionReport, own_scale, power_below
from dtrain.tools.format_styles import STYLES
from dtrain.tools.formats.histogram import chosen_names

_MOST_LAYERS = 24  # rows of the map that remain readable


class _Range(NamedTuple):
    """The range of a format when numbers are multiplied by ``scale`` before the cast."""

    label: str
    floats: FloatFormat
    scale: float


def draw(reports: Sequence[PrecisionReport], pattern: str, path: Path) -> None:
    """Writes a PNG: the newest step's exponents, the formats' ranges, and the share that FP16 flushes per layer."""
    newest = reports[-1]
    names = chosen_names(newest, pattern)
    layers = _layers(names)
    figure = Figure(figsize=(9, 7.6 + 0.16 * len(layers)), dpi=110, layout="constrained")
    counts, ranges, over_time = figure.subplots(3, 1, height_ratios=(4, 2.2, 1.6 + 0.22 * len(layers)))
    chosen = {name: own for name, own in newest.unscaled().items() if name in names}
    total = reduce(add, chosen.values())
    drawn = _ranges(newest, total)
    _draw_counts(counts, total, newest)
    _draw_ranges(ranges, drawn, total)
    limits = _exponent_limits(total)
    for axes in (counts, ranges):
        axes.set_xlim(*limits)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
    ranges.set_xlabel("exponent of the gradient without loss scale: magnitude $2^e$")
    _draw_map(figure, over_time, reports, layers)
    figure.savefig(path)


def _layers(names: Sequence[str]) -> dict[str, list[str]]:
    """Returns the parameters by row of the map: each its own row, or grouped by their module if they are too many."""
    if len(names) <= _MOST_LAYERS:
        return {name: [name] for name in names}
    depth = max(name.count(".") for name in names)
    while True:
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(".".join(name.split(".")[:depth]), []).append(name)
        if len(groups) <= _MOST_LAYERS or depth == 1:
            return groups
        depth -= 1


def _ranges(report: PrecisionReport, total: Histogram) -> list[_Range]:
    scales = {report.loss_scale: "loss scale of the step"}
    if report.better_scale is not None:
        scales.setdefault(report.better_scale, "better scale")
    found = [_Range(f"FP16, scale {scale:g}\n({name})", FP16, power_below(scale)) for scale, name in scales.items()]
    top = total.top_exponent
    # that of the elements counted: a tensor with smaller ones has a scale of its own, which keeps more of them
    largest = 0.0 if top is None else math.ldexp(1.0, top)
    own = [_Range(f"{f.name.upper()}, one scale", f, own_scale(largest, f)) for f in (FP8_E4M3, FP8_E5M2)]
    return [*found, _Range("BF16", BF16, 1.0), *own]


def _exponent_limits(total: Histogram) -> tuple[float, float]:
    exponents = list(total.by_exponent()) or [0]
    return min(exponents) - 6, max(exponents) + 12


def _draw_counts(axes: Axes, total: Histogram, report: PrecisionReport) -> None:
    counts = total.by_exponent()
    shares = [share(count, total.num_nonzero) for count in counts.values()]
    axes.bar([e + 0.5 for e in counts], shares, width=0.92, color="#0072B2")
    axes.set_yscale("log")
    axes.set_ylabel("share of the nonzero elements")
    zeros = share(total.zeros, total.total)
    axes.set_title(
        f"Gradients of step {report.step} as they leave backward: {total.total:,} elements, {zeros:.1%} zeros",
        fontsize=12,
    )


def _draw_ranges(axes: Axes, ranges: Sequence[_Range], total: Histogram) -> None:
    for row, (_, floats, scale) in enumerate(reversed(ranges)):
        color, *_ = STYLES[floats]
        shift = math.log2(scale)
        lowest, normal, top = (
            math.log2(number) - shift for number in (floats.min_subnormal / 2, floats.min_normal, floats.max)
        )
        axes.barh(row, normal - lowest, left=lowest, height=0.62, color=color, alpha=0.4)
        axes.barh(row, top - normal, left=normal, height=0.62, color=color)
        flushed = share(total.flushed(floats, scale), total.num_nonzero)
        overflow = share(total.overflowing(floats, scale), total.num_nonzero)
        text = f"{flushed:.2%} flushed" + (f", {overflow:.2%} overflow" if overflow else "")
        axes.annotate(
            text, (0.995, row), xycoords=("axes fraction", "data"), ha="right", va="center", fontsize=9,
            bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
        )  # fmt: skip
    axes.set_yticks(range(len(ranges)), [own.label for own in reversed(ranges)], fontsize=9)
    axes.set_ylabel("kept by\n(pale: fewer bits)")


def _draw_map(figure: Figure, axes: Axes, reports: Sequence[PrecisionReport], layers: dict[str, list[str]]) -> None:
    unscaled = [report.unscaled() for report in reports]
    rows = [
        [_median_exponent([own[name] for name in names if name in own]) for own in unscaled]
        for names in layers.values()
    ]
    image = axes.pcolormesh(rows, cmap="viridis", edgecolors="white", linewidth=0.3)
    axes.set_yticks([number + 0.5 for number in range(len(layers))], list(layers), fontsize=7)
    axes.invert_yaxis()
    stride = -(-len(reports) // 12)
    positions = range(0, len(reports), stride)
    axes.set_xticks([index + 0.5 for index in positions], [str(reports[index].step) for index in positions])
    axes.set_xlabel("step")
    axes.set_title("Median exponent of each layer's gradient, without loss scale", fontsize=11)
    bar = figure.colorbar(image, ax=axes, pad=0.01)
    bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    flushed = math.log2(FP16.min_normal / reports[-1].loss_scale)
    lowest, highest = bar.ax.get_ylim()
    if lowest < flushed < highest:
        bar.ax.axhline(flushed, color="#D55E00", linewidth=2)
        bar.set_label(f"line: FP16 keeps all bits above (scale {reports[-1].loss_scale:g})", fontsize=8)


def _median_exponent(histograms: Sequence[Histogram]) -> float:
    """Returns the exponent that half of the nonzero elements reach; NaN without any."""
    counts = reduce(add, histograms).by_exponent() if histograms else {}
    below, half = 0, sum(counts.values()) / 2
    for exponent, count in counts.items():
        below += count
        if below >= half:
            return exponent
    return math.nan
