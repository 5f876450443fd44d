"""Each kind of task in BF16, FP16 and FP8 against FP32 over the steps, in units of FP32's own noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dtrain.measure.experiment.tasks import TASKS, ProductShares, SmallTask, TaskCurve
from dtrain.measure.noise import DETECTION_LIMIT, Noise
from dtrain.tools.format_styles import GREY, PRECISION_COLORS
from dtrain.tools.tables import Table, plural

PAPER = (
    "mixed precision in FP16 matches FP32 on all networks, such as ResNet-50 with 76.04 % against 75.92 % top-1 "
    "(section 4.1); BF16 and FP8 came later"
)
PRECISIONS = ("bf16", "fp16", "fp8")

_LINES = {"bf16": ("-", 3.6), "fp16": ("--", 1.8), "fp8": ("-", 1.4)}
"""Dash and width: BF16 stays visible behind FP8, which equals it in a model without FP8 Linears."""


@dataclass(frozen=True)
class FormatCurves:
    """The trainings in one format, one for each seed."""

    precision: str
    curves: list[TaskCurve]

    @property
    def metric(self) -> float | None:
        """Mean metric at the end."""
        found = [curve.metric for curve in self.curves if curve.metric is not None]
        return fmean(found) if found else None

    def losses(self, index: int = -1) -> list[float]:
        """Returns the loss of each seed at the validation ``index``."""
        return [curve.losses[index] for curve in self.curves]


@dataclass(frozen=True)
class TaskComparison:
    """A task in all formats.

    Attributes:
        metric: its name; empty: the task has none.
        steps: at which the validation loss is measured.
        perturbed: FP32 with the first seed and every initial weight moved by an ulp, up or down.
    """

    task: str
    metric: str
    steps: list[int]
    shares: ProductShares
    fp32: FormatCurves
    perturbed: list[TaskCurve]
    formats: list[FormatCurves]

    def of(self, precision: str) -> FormatCurves:
        return next(found for found in self.formats if found.precision == precision)

    def noise(self, index: int = -1) -> Noise:
        reference, *seeds = self.fp32.losses(index)
        return Noise.of(reference, [curve.losses[index] for curve in self.perturbed], seeds)

    def gaps(self, precision: str, index: int = -1) -> list[float]:
        """Returns the loss minus FP32's with the same seed, in units of noise, at the validation ``index``."""
        pairs = zip(self.of(precision).losses(index), self.fp32.losses(index), strict=True)
        return [(loss - fp32) / self.noise(index).unit for loss, fp32 in pairs]

    def mean_gaps(self, precision: str) -> list[float]:
        """Returns the mean gap of the seeds at each validation."""
        return [fmean(self.gaps(precision, index)) for index in range(len(self.steps))]


@dataclass(frozen=True)
class FormatsResult:
    seeds: list[int]
    tasks: list[TaskComparison]


def run(tasks: Sequence[SmallTask] = TASKS, seeds: Sequence[int] = (0, 1, 2, 3)) -> FormatsResult:
    """Trains every task in every format with every seed.

    Raises:
        ConfigError: a library that a model needs is missing.
    """
    shares = [task.product_shares() for task in tasks]  # builds all models before the first is trained
    return FormatsResult(list(seeds), [compare(task, found, seeds) for task, found in zip(tasks, shares, strict=True)])


def compare(task: SmallTask, shares: ProductShares, seeds: Sequence[int]) -> TaskComparison:
    """Trains one task in every format with every seed."""
    fp32, *formats = (
        FormatCurves(precision, [task.train(precision, seed) for seed in seeds]) for precision in ("fp32", *PRECISIONS)
    )
    perturbed = [task.train("fp32", seeds[0], perturbation=number) for number in range(1, len(seeds))]
    return TaskComparison(task.name, task.metric, task.validation_steps, shares, fp32, perturbed, formats)


def finding(result: FormatsResult) -> str:
    pairs = [(item, precision, item.mean_gaps(precision)) for item in result.tasks for precision in PRECISIONS]
    outside = [pair for pair in pairs if abs(pair[2][-1]) >= DETECTION_LIMIT]
    inside = [gaps for *_, gaps in pairs if abs(gaps[-1]) < DETECTION_LIMIT]
    if not inside:
        return "At the end every format can be told from FP32's own noise"
    largest = f"{max(abs(gaps[-1]) for gaps in inside):.1f} units"
    at_any_step = f"{max(abs(gap) for gaps in inside for gap in gaps):.1f} at any step"
    if not outside:
        return f"No format can be told from FP32's own noise; mean gaps are at most {largest} at the end, {at_any_step}"
    named = ", ".join(f"{name.upper()} on {item.task} ({gaps[-1]:+.1f} units)" for item, name, gaps in outside)
    return f"Outside FP32's own noise: {named}; other mean gaps are at most {largest} at the end, {at_any_step}"


def tables(result: FormatsResult) -> list[Table]:
    columns = ("task", "format", "products", "loss", "metric", *_FRACTIONS, "each seed at the end", "skipped")
    rows = []
    for item in result.tasks:
        noise = item.noise()
        unit = [f"unit {item.noise(index).unit:.2g}" for index in _quarters(item)]
        note = f"noise of seeds {noise.seed:.2g}, of rounding {noise.rounding:.2g}"
        loss, metric = f"{fmean(item.fp32.losses()):.4g}", _metric(item, item.fp32)
        rows.append((item.task, "fp32", f"{plural(item.steps[-1], 'step')}", loss, metric, *unit, note, ""))
        for found in item.formats:
            means = item.mean_gaps(found.precision)
            gaps = [f"{means[index]:+.2f}" for index in _quarters(item)]
            each = " ".join(f"{gap:+.2f}" for gap in item.gaps(found.precision))
            loss, metric = f"{fmean(found.losses()):.4g}", _metric(item, found)
            products = _products(item.shares, found.precision)
            skipped = sum(curve.skipped for curve in found.curves)
            rows.append(("", found.precision, products, loss, metric, *gaps, each, f"{skipped}"))
    seeds = plural(len(result.seeds), "seed")
    return [Table(f"Validation loss, and its gap to FP32 in units of FP32's noise, mean of {seeds}", columns, rows)]


_FRACTIONS = ("gap at 1/4 of the steps", "1/2", "3/4", "end")


def _quarters(item: TaskComparison) -> list[int]:
    count = len(item.steps)
    return [max(0, count * quarter // len(_FRACTIONS) - 1) for quarter in range(1, 1 + len(_FRACTIONS))]


def _metric(item: TaskComparison, found: FormatCurves) -> str:
    return "" if found.metric is None else f"{item.metric} {found.metric:.3f}"


def _products(shares: ProductShares, precision: str) -> str:
    if precision != "fp8":
        return f"all {precision}"
    linears = f"Linears: {shares.num_float8} of {shares.num_linears}"
    convolutions = f"; convolutions, {shares.convolutions:.0%}, bf16" if shares.convolutions else ""
    return f"{shares.float8:.0%} fp8 ({linears}){convolutions}"


def draw(figure: Figure, result: FormatsResult) -> None:
    """Draws the mean gap, and that of each seed, over the steps: a panel for each task."""
    columns = min(3, len(result.tasks))
    rows = -(-len(result.tasks) // columns)
    figure.set_size_inches(4.1 * columns, 2.9 * rows + 1.3)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, item in zip(panels, result.tasks, strict=False):
        _draw_task(axes, item)
    for axes in panels[len(result.tasks) :]:
        axes.axis("off")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=10, frameon=False)
    label = "validation loss minus FP32's with the same seed,\nin units of FP32's noise at that step"
    figure.supylabel(label, fontsize=10)


def _draw_task(axes: Axes, item: TaskComparison) -> None:
    axes.axhspan(-DETECTION_LIMIT, DETECTION_LIMIT, color=GREY, alpha=0.2, label="cannot be told from noise")
    axes.axhline(0, color=PRECISION_COLORS["fp32"], linewidth=1.0, label="fp32")
    for precision in PRECISIONS:
        color, (dash, width) = PRECISION_COLORS[precision], _LINES[precision]
        seeds = [item.gaps(precision, index) for index in range(len(item.steps))]
        axes.plot(item.steps, seeds, dash, color=color, alpha=0.35, linewidth=0.8)
        means = item.mean_gaps(precision)
        label = f"{precision}, mean"
        axes.plot(item.steps, means, f"o{dash}", color=color, markersize=2.2 * width, linewidth=width, label=label)
    axes.plot([], [], color="black", alpha=0.4, linewidth=0.8, label="one seed")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, -1.5 * DETECTION_LIMIT), max(high, 1.5 * DETECTION_LIMIT))
    axes.set_title(f"{item.task}: {item.shares.float8:.0%} of products in fp8", fontsize=11)
    axes.set_xlabel("steps")
    axes.grid(alpha=0.3)
