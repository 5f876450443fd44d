"""One network in FP32, and in FP16 without loss scaling, with constant scales, and with the dynamic one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dtrain.measure.experiment.networks import DETECTOR_VARIANCE, detector
from dtrain.measure.experiment.train import BLOCK, LossCurve, train
from dtrain.tools.format_styles import PRECISION_COLORS
from dtrain.tools.tables import Table

PAPER = (
    "Multibox SSD diverges in FP16 without loss scaling; with a factor of 8 it reaches 77.1 % mAP, in FP32 76.9 % "
    "(sections 3.2 and 4.2)"
)
SCALES: tuple[str | float, ...] = ("none", 8.0, 128.0, 1024.0, 32768.0, "dynamic")
_SHADES = {"none": "#000000", "8": "#7f3000", "1024": "#D55E00", "dynamic": "#E69F00"}  # of the curves shown
_DASHES = {"none": "-", "8": "--", "1024": "-.", "dynamic": ":"}


@dataclass(frozen=True)
class ScaledTraining:
    """A training; ``loss_scale`` is ``none``, a number or ``dynamic``. Losses are in units of the target's variance."""

    precision: str
    loss_scale: str
    seed: int
    curve: LossCurve


@dataclass(frozen=True)
class LossScalingResult:
    steps: int
    trainings: list[ScaledTraining]

    def of(self, precision: str, loss_scale: str) -> list[ScaledTraining]:
        """Returns the trainings of all seeds."""
        return [item for item in self.trainings if (item.precision, item.loss_scale) == (precision, loss_scale)]

    def final(self, precision: str, loss_scale: str) -> float:
        """Mean over the seeds."""
        return fmean(item.curve.final for item in self.of(precision, loss_scale))

    @property
    def fp32(self) -> float:
        return self.final("fp32", "none")


def run(
    steps: int = 300, seeds: Sequence[int] = (0, 1, 2), scales: Sequence[str | float] = SCALES
) -> LossScalingResult:
    cases = [("fp32", "none"), *(("fp16", scale) for scale in scales)]
    return LossScalingResult(
        steps, [_train(precision, scale, steps, seed) for precision, scale in cases for seed in seeds]
    )


def _train(precision: str, scale: str | float, steps: int, seed: int) -> ScaledTraining:
    curve = train(detector(), precision, steps, seed=seed, loss_scale=scale)
    losses = [loss / DETECTOR_VARIANCE for loss in curve.losses]
    relative = replace(curve, losses=losses, final=curve.final / DETECTOR_VARIANCE)
    return ScaledTraining(precision, scale if isinstance(scale, str) else f"{scale:g}", seed, relative)


def finding(result: LossScalingResult) -> str:
    unscaled, dynamic = result.final("fp16", "none"), result.final("fp16", "dynamic")
    return (
        f"In FP16 without loss scaling the detector learns nothing: its loss ends at {unscaled / result.fp32:.0f} "
        f"times FP32's; with the dynamic loss scale at {dynamic / result.fp32:.2f} times"
    )


def tables(result: LossScalingResult) -> list[Table]:
    columns = ("precision", "loss scale", "final loss / variance", "times FP32", "skipped steps")
    rows = []
    for precision, scale in dict.fromkeys((item.precision, item.loss_scale) for item in result.trainings):
        final = result.final(precision, scale)
        skipped = sum(item.curve.skipped for item in result.of(precision, scale))
        rows.append((precision, scale, f"{final:.4f}", f"{final / result.fp32:.2f}", f"{skipped}"))
    seeds = len(result.of("fp32", "none"))
    return [Table(f"A detector's regression, {result.steps} steps, mean of {seeds} seeds", columns, rows)]


def draw(figure: Figure, result: LossScalingResult) -> None:
    figure.set_size_inches(10, 4.6)
    curves, finals = figure.subplots(1, 2, width_ratios=(1.25, 1))
    _draw_curves(curves, result)
    _draw_finals(finals, result)
    for axes in (curves, finals):
        axes.grid(alpha=0.3, which="both")


def _draw_curves(axes: Axes, result: LossScalingResult) -> None:
    axes.set_yscale("log")
    fp32 = result.of("fp32", "none")[0]
    axes.plot(*fp32.curve.points(), color=PRECISION_COLORS["fp32"], alpha=0.4, linewidth=6, label="fp32")
    for scale, color in _SHADES.items():
        for item in result.of("fp16", scale)[:1]:
            label = {"none": "fp16, no scaling", "dynamic": "fp16, dynamic loss scale"}.get(
                scale, f"fp16, loss scale {scale}"
            )
            axes.plot(*item.curve.points(), _DASHES[scale], color=color, linewidth=1.8, label=label)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.text(0, 1.12, "loss of the best constant answer", fontsize=8.5)
    axes.set(xlabel="step", ylabel=f"loss / variance of the targets, means of {BLOCK} steps")
    axes.set_ylim(top=1.7)
    axes.legend(fontsize=8.5, loc="lower left")


def _draw_finals(axes: Axes, result: LossScalingResult) -> None:
    axes.set_yscale("log")
    scales = list(dict.fromkeys(item.loss_scale for item in result.trainings if item.precision == "fp16"))
    for place, scale in enumerate(scales):
        for item in result.of("fp16", scale):
            axes.plot(place, item.curve.final, "o", color=PRECISION_COLORS["fp16"], markersize=5)
    references = [item.curve.final for item in result.of("fp32", "none")]
    axes.axhspan(min(references), max(references), color=PRECISION_COLORS["fp32"], alpha=0.4)
    axes.text(0, max(references) * 1.05, f"fp32, {len(references)} seeds", fontsize=9, color=PRECISION_COLORS["fp32"])
    axes.set_xticks(range(len(scales)), scales)
    axes.set(xlabel="loss scale of FP16", ylabel="final loss / variance, one dot a seed")
