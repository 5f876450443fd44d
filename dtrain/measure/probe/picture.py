"""Picture of a probe: the gap of each format against noise, its effect on each module, and the gradients' range."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from dtrain.measure.probe.records import ProductResult, Trial
from dtrain.measure.probe.report import ConstantScale, ProbeReport, all_gradients
from dtrain.measure.probe.sections import module_name, trial_name
from dtrain.precision.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FloatFormat
from dtrain.tools.format_styles import GREY, PRECISION_COLORS
from dtrain.tools.tables import plural

_NUM_MODULES = 24  # rows of the heat maps
_LONGEST_NAME = 32
_MAX_UNITS = 20.0  # a larger gap is drawn here
_PRODUCTS = (("fprop", "forward"), ("dgrad",), ("wgrad",))  # columns of a format


def draw(report: ProbeReport, path: Path) -> None:
    """Writes a PNG."""
    modules = _worst_modules(report)
    height = 4.2 + 1.2 + 0.2 * max(len(modules), 11)  # the color bars' labels need some
    figure = Figure(figsize=(11.5, height), dpi=120, layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(4.2, height - 4.2))
    top, bottom = parts
    gaps, gradients = top.subplots(1, 2, width_ratios=(4, 5))
    _draw_gaps(gaps, report)
    _draw_gradients(gradients, report)
    _draw_modules(bottom, report, modules)
    figure.suptitle(_title(report), fontsize=13)
    figure.savefig(path)


def _title(report: ProbeReport) -> str:
    advised = report.advice.precision
    num_rules = len(report.advice.rules)
    rules = f" with {plural(num_rules, 'rule')}" if num_rules else ""
    bf16 = report.trial("bf16")
    if bf16 is None:
        return f"Advice: {advised}{rules}"
    if not report.is_off(bf16):
        answer = f"yes, within FP32's noise after {len(bf16.losses)} steps"
    elif math.isfinite(bf16.gap):
        answer = f"no, {report.units(bf16.gap):+.1f} noise units after {len(bf16.losses)} steps"
    else:
        answer = "no, it fails"
    return f"Is BF16 safe for this model? {answer[0].upper()}{answer[1:]}. Advice: {advised}{rules}"


# -- gaps --------------------------------------------------------------------------------------------------------------


def _draw_gaps(axes: Axes, report: ProbeReport) -> None:
    trials = [*report.trials[1:], *report.retrained]
    units = report.units
    finite = [abs(units(trial.gap)) for trial in trials if math.isfinite(trial.gap)]
    limit = min(max([3.0, *(1.3 * value for value in finite)]), _MAX_UNITS)
    axes.axvspan(-2, 2, color="#d9d9d9", label="within FP32's noise (2 units)")
    axes.axvline(0, color="black", linewidth=0.8)
    for row, trial in enumerate(trials):
        _draw_gap(axes, row, trial, units, limit)
    axes.set_yticks(range(len(trials)), [trial_name(report, trial).replace(" ", "\n", 1) for trial in trials])
    axes.set_ylim(len(trials) - 0.4, -0.6)
    axes.set_xlim(-limit, limit)
    axes.set_xlabel(f"loss less FP32's, in units of its noise ({report.unit:.2g})")
    axes.set_title("Loss gap after the trial", fontsize=11)
    axes.legend(loc="lower left", fontsize=8, frameon=False)


def _draw_gap(axes: Axes, row: int, trial: Trial, units: Callable[[float], float], limit: float) -> None:
    color = PRECISION_COLORS.get(trial.format, GREY)
    if not math.isfinite(trial.gap):
        axes.plot(0.94 * limit, row, "x", color=color, markersize=10, markeredgewidth=2.5)
        axes.text(0.86 * limit, row, "fails", ha="right", va="center", fontsize=9, color=color)
        return
    value = units(trial.gap)
    shown = max(-0.96 * limit, min(value, 0.96 * limit))
    marker = "o" if shown == value else (">" if value > 0 else "<")
    axes.plot([0, shown], [row, row], color=color, linewidth=3)
    axes.plot(shown, row, marker, color=color, markersize=8)
    side = "center" if abs(shown) < 0.8 * limit else ("right" if value > 0 else "left")
    axes.annotate(
        f"{value:+.2f}", (shown, row), xytext=(0, 9), textcoords="offset points", ha=side, fontsize=9, color=color
    )


# -- gradients ---------------------------------------------------------------------------------------------------------


def _draw_gradients(axes: Axes, report: ProbeReport) -> None:
    axes.set_title("Gradients of weights and activations, and what formats hold", fontsize=11)
    total = all_gradients(report.analysis)
    if total is None or not total.num_nonzero:
        axes.text(0.5, 0.5, "no gradient was found", ha="center", transform=axes.transAxes)
        return
    counts = total.by_exponent()
    lowest = min(exponent for exponent, count in counts.items() if count >= 1e-4 * total.num_nonzero)
    shares = {exponent: 100 * count / total.num_nonzero for exponent, count in counts.items() if exponent >= lowest}
    axes.bar([e + 0.5 for e in shares], list(shares.values()), width=1.0, color="#0072B2", edgecolor="white")
    peak = max(shares.values())
    scale = ConstantScale.of(report.analysis)
    rows = _ranges(max(shares), scale)
    start, stop = lowest - 2, max(*shares, FP16.max_exponent) + 2
    for row, (floats, color, label, power) in enumerate(rows):
        y = -peak * (0.10 + 0.11 * row)
        low, normal = math.log2(floats.min_subnormal) - power, floats.min_exponent - power
        for left, right, alpha in ((low, normal, 0.4), (normal, floats.max_exponent + 1 - power, 1.0)):
            left, right = max(left, start), min(right, stop)
            if left < right:
                axes.barh(y, right - left, left=left, height=0.085 * peak, color=PRECISION_COLORS[color], alpha=alpha)
        axes.text(stop + 0.5, y, label, va="center", fontsize=8)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.axvline(math.log2(FP16.min_subnormal), color=PRECISION_COLORS["fp16"], linewidth=1, linestyle=":")
    if scale is not None:
        note = f"FP16 flushes {scale.flushed_unscaled:.2%}\nof the nonzero ones to zero,\n{scale.flushed:.2%} if scaled"
        axes.text(0.98, 0.96, note, ha="right", va="top", fontsize=9, transform=axes.transAxes)
    axes.set_xlim(start, stop)
    axes.set_ylim(-peak * (0.16 + 0.11 * len(rows)), 1.08 * peak)
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= peak])
    axes.set_xlabel("power of two of the magnitude (bars below: ranges; pale: subnormal)")
    axes.set_ylabel("% of the nonzero gradients")


def _ranges(top: int, scale: ConstantScale | None) -> list[tuple[FloatFormat, str, str, float]]:
    """Returns the formats to draw: color, label, and the power of two that numbers are multiplied by."""
    rows: list[tuple[FloatFormat, str, str, float]] = [(BF16, "bf16", "bf16", 0), (FP16, "fp16", "fp16", 0)]
    if scale is not None:
        rows.append((FP16, "fp16", f"fp16 at loss scale {scale.scale:g}", math.log2(scale.scale)))
    # FP8 has a scale for each tensor, which fits its largest number
    return rows + [(f, "fp8", f"{f.name}, scaled", f.max_exponent - top) for f in (FP8_E5M2, FP8_E4M3)]


# -- modules -----------------------------------------------------------------------------------------------------------


def _worst_modules(report: ProbeReport) -> list[str]:
    """Returns the modules with the largest predicted change in any format, in the order of the model."""
    largest: dict[str, float] = {}
    for result in report.analysis.products:
        largest[result.module] = max(largest.get(result.module, 0.0), result.size)
    worst = set(sorted(largest, key=lambda name: largest[name], reverse=True)[:_NUM_MODULES])
    return [name for name in largest if name in worst]


def _draw_modules(figure: Any, report: ProbeReport, modules: Sequence[str]) -> None:
    formats = [trial.format for trial in report.trials if report.analysis.worst(trial.format)]
    if not formats:
        figure.text(0.5, 0.5, "no module was examined", ha="center")
        return
    sqnr, change = figure.subplots(1, 2, sharey=True)

    def figures(value: Callable[[ProductResult], float], worse: Callable[[float, float], float]) -> list[list[float]]:
        cells: dict[tuple[str, str, int], float] = {}
        for result in report.analysis.products:
            key = (result.module, result.format, _column(result))
            cells[key] = worse(cells[key], value(result)) if key in cells else value(result)
        columns = [(name, index) for name in formats for index in range(len(_PRODUCTS))]
        return [[cells.get((module, *column), math.nan) for column in columns] for module in modules]

    causes = {(r.module, r.format, _column(r)): r.cause[:1].upper() for r in report.analysis.products if r.cause}
    for (module, name, column), letter in causes.items():
        if module in modules and name in formats:  # BF16 is examined for FP8's sake too
            x = len(_PRODUCTS) * formats.index(name) + column
            sqnr.text(x, modules.index(module), letter, ha="center", va="center", fontsize=7)
    decibels = figures(lambda result: max(-10.0, min(result.sqnr_db, 100.0)), min)
    _heat_map(figure, sqnr, decibels, formats, Normalize(0, 80), "RdYlBu", "SQNR of the result, dB")
    changes = figures(lambda result: min(max(result.predicted / report.unit, 1e-9), 1e9), max)
    _heat_map(figure, change, changes, formats, LogNorm(1e-4, 10), "YlOrRd", "predicted change of the loss, in units")
    names = [module_name(name) for name in modules]
    short = [name if len(name) <= _LONGEST_NAME else f"...{name[-_LONGEST_NAME:]}" for name in names]
    sqnr.set_yticks(range(len(names)), short)
    sqnr.tick_params(axis="y", labelsize=8)
    num_modules = len({result.module for result in report.analysis.products})
    is_all = num_modules == len(modules)
    which = "all modules" if is_all else f"the {len(modules)} most affected of {num_modules} modules"
    figure.suptitle(
        f"Each product alone in its format: {which}. Lost by range: R, by precision: P; empty: no such product",
        fontsize=11,
    )


def _column(result: ProductResult) -> int:
    return next(index for index, names in enumerate(_PRODUCTS) if result.product in names)


def _heat_map(
    figure: Any, axes: Axes, values: list[list[float]], formats: Sequence[str], norm: Any, colors: str, title: str
) -> None:
    image = axes.imshow(values, aspect="auto", cmap=colors, norm=norm, interpolation="nearest")
    num = len(_PRODUCTS)
    axes.set_xticks(range(num * len(formats)), ["fprop", "dgrad", "wgrad"] * len(formats), fontsize=8, rotation=45)
    for index, name in enumerate(formats):
        axes.text(num * index + (num - 1) / 2, -0.7, name, ha="center", va="bottom", fontsize=9, weight="bold")
        if index:
            axes.axvline(num * index - 0.5, color="white", linewidth=3)
    figure.colorbar(image, ax=axes, label=title, extend="both")
