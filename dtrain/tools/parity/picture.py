"""The picture of a comparison: the curves, and how far each engine is from the oracle at each step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dtrain.tools.parity.compare import LOSS, shares
from dtrain.tools.parity.records import EngineResult, Report
from dtrain.tools.parity.trajectory import Point

# Okabe and Ito's colours, which colour-blind readers tell apart, each with a dash and a marker of its own
_STYLES = (("#0072B2", "-", "o"), ("#D55E00", "--", "s"), ("#009E73", "-.", "^"), ("#CC79A7", ":", "D"))
_GREY = "#7f7f7f"
_CEILING = 1e6  # where an infinite share of a limit is drawn


def draw(report: Report, path: Path) -> None:
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
    verdict = "all engines agree with the oracle" if report.agrees else "not all engines agree with the oracle"
    figure.suptitle(
        f"Parity in {report.precision.upper()}, {report.num_parameters:,} parameters: {verdict}", fontsize=11
    )
    figure.savefig(path)


def _draw_curves(axes: Axes, report: Report) -> None:
    axes.plot(*_series(report.oracle), color="#c0c0c0", linewidth=6, label="oracle, FP32", solid_capstyle="round")
    if report.yardstick:
        axes.plot(*_series(report.yardstick), color=_GREY, linewidth=1.5, label=_yardstick_name(report))
    for result, (color, dash, marker) in _styled(report):
        label = result.engine if result.agrees else f"{result.engine} (parts)"
        axes.plot(*_series(result.curve), dash, marker=marker, markersize=3, color=color, linewidth=1.2, label=label)
    axes.plot([], [], color="black", linewidth=0.8, label="limit")
    axes.set_ylabel("loss")


def _draw_losses(axes: Axes, report: Report) -> None:
    axes.set_yscale("log")
    if report.yardstick_deviations is not None:
        _plot(axes, 1, report.yardstick_deviations.loss, color=_GREY, linewidth=1.5)
    for result, (color, dash, marker) in _styled(report):
        if result.deviations is not None and result.allowed is not None:
            _plot(axes, 1, result.deviations.loss, color=color, linestyle=dash, marker=marker)
            _plot(axes, 1, result.allowed.loss, color="black", linewidth=0.8)
    axes.set_ylabel("loss: deviation\n(relative)")


def _draw_weights(axes: Axes, report: Report) -> None:
    axes.set_yscale("log")
    axes.axhline(1.0, color="black", linewidth=0.8)  # the limit
    for result, (color, dash, marker) in _styled(report):
        if result.deviations is not None and result.allowed is not None:
            rows = shares(result.deviations, result.allowed)
            worst = [max(share for what, share in row.items() if what != LOSS) for row in rows]
            _plot(axes, 0, worst, color=color, linestyle=dash, marker=marker)
            if result.parting is not None and result.parting.what in result.deviations.weights:
                _mark(axes, result, worst[result.parting.step], color)
    axes.set_ylabel("weights: worst tensor,\nshare of what is allowed")


def _mark(axes: Axes, result: EngineResult, share: float, color: str) -> None:
    parting = result.parting
    assert parting is not None
    axes.annotate(
        f"{parting.what}, step {parting.step}",
        (parting.step, min(share, _CEILING)),
        xytext=(6, -12),
        textcoords="offset points",
        fontsize=7,
        color=color,
    )


def _plot(axes: Axes, first_step: int, values: Sequence[float], **style: object) -> None:
    """A line without its zeros, which a logarithmic axis does not have."""
    points = [(step, min(value, _CEILING)) for step, value in enumerate(values, start=first_step) if value > 0]
    axes.plot([step for step, _ in points], [value for _, value in points], markersize=3, **style)  # type: ignore[arg-type]


def _series(curve: Sequence[Point]) -> tuple[list[int], list[float]]:
    return list(range(1, len(curve) + 1)), [point.loss for point in curve]


def _styled(report: Report) -> list[tuple[EngineResult, tuple[str, str, str]]]:
    return [(result, _STYLES[index % len(_STYLES)]) for index, result in enumerate(report.engines)]


def _yardstick_name(report: Report) -> str:
    return f"plain PyTorch, {report.precision.upper()}"
