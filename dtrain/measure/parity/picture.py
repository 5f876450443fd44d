"""Picture of a comparison: the curves, and the deviation of each engine from the oracle at each step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dtrain.measure.parity.compare import LOSS, Mismatch, Point, limit_shares
from dtrain.measure.parity.records import EngineResult, ParityReport

# colors by Okabe and Ito, distinct for color-blind readers, each with its own dash and marker
_STYLES = (("#0072B2", "-", "o"), ("#D55E00", "--", "s"), ("#009E73", "-.", "^"), ("#CC79A7", ":", "D"))
_GREY = "#7f7f7f"
_CEILING = 1e6  # an infinite share of a limit is drawn here


def draw(report: ParityReport, path: Path) -> None:
    """Writes a PNG: the losses, their deviations, and each step's worst tensor of weights against its limit."""
    figure = Figure(figsize=(7.5, 8.2), dpi=130, layout="constrained")
    curves, losses, weights = figure.subplots(3, 1, sharex=True, height_ratios=(4, 3, 3))
    _draw_curves(curves, report)
    _draw_losses(losses, report)
    _draw_weights(weights, report)
    for axes in (curves, losses, weights):
        axes.grid(alpha=0.3)
    weights.set_xlabel("step")
    weights.xaxis.set_major_locator(MaxNLocator(integer=True))
    handles, labels = curves.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    summary = "all engines agree with the oracle" if report.agrees else "not all engines agree with the oracle"
    figure.suptitle(
        f"Parity in {report.precision.upper()}, {report.num_parameters:,} parameters: {summary}", fontsize=11
    )
    figure.savefig(path)


def _draw_curves(axes: Axes, report: ParityReport) -> None:
    axes.plot(*_series(report.oracle), color="#c0c0c0", linewidth=6, label="oracle, FP32", solid_capstyle="round")
    if report.noise_baseline:
        label = f"noise baseline (plain PyTorch, {report.precision.upper()})"
        axes.plot(*_series(report.noise_baseline), color=_GREY, linewidth=1.5, label=label)
    for result, (color, dash, marker) in _styled(report):
        label = result.engine if result.agrees else f"{result.engine} (deviates)"
        axes.plot(*_series(result.curve), dash, marker=marker, markersize=3, color=color, linewidth=1.2, label=label)
    axes.plot([], [], color="black", linewidth=0.8, label="limit")
    axes.set_ylabel("loss")


def _draw_losses(axes: Axes, report: ParityReport) -> None:
    axes.set_yscale("log")
    if report.noise_deviations is not None:
        _plot(axes, 1, report.noise_deviations.loss, color=_GREY, linewidth=1.5)
    for result, (color, dash, marker) in _styled(report):
        if result.deviations is not None and result.limits is not None:
            _plot(axes, 1, result.deviations.loss, color=color, linestyle=dash, marker=marker)
            _plot(axes, 1, result.limits.loss, color="black", linewidth=0.8)
    axes.set_ylabel("loss: deviation\n(relative)")


def _draw_weights(axes: Axes, report: ParityReport) -> None:
    axes.set_yscale("log")
    axes.axhline(1.0, color="black", linewidth=0.8)  # the limit
    for result, (color, dash, marker) in _styled(report):
        if result.deviations is not None and result.limits is not None:
            rows = limit_shares(result.deviations, result.limits)
            worst = [max(share for quantity, share in row.items() if quantity != LOSS) for row in rows]
            _plot(axes, 0, worst, color=color, linestyle=dash, marker=marker)
            if result.mismatch is not None and result.mismatch.quantity in result.deviations.weights:
                _annotate(axes, result.mismatch, worst[result.mismatch.step], color)
    axes.set_ylabel("weights: worst tensor,\nshare of its limit")


def _annotate(axes: Axes, mismatch: Mismatch, share: float, color: str) -> None:
    axes.annotate(
        f"{mismatch.quantity}, step {mismatch.step}",
        (mismatch.step, min(share, _CEILING)),
        xytext=(6, -12),
        textcoords="offset points",
        fontsize=7,
        color=color,
    )


def _plot(axes: Axes, first_step: int, values: Sequence[float], **style: object) -> None:
    """Draws a line without its zeros, which a logarithmic axis cannot show."""
    points = [(step, min(value, _CEILING)) for step, value in enumerate(values, start=first_step) if value > 0]
    axes.plot([step for step, _ in points], [value for _, value in points], markersize=3, **style)  # type: ignore[arg-type]


def _series(curve: Sequence[Point]) -> tuple[list[int], list[float]]:
    return list(range(1, len(curve) + 1)), [point.loss for point in curve]


def _styled(report: ParityReport) -> list[tuple[EngineResult, tuple[str, str, str]]]:
    return [(result, _STYLES[index % len(_STYLES)]) for index, result in enumerate(report.engines)]
