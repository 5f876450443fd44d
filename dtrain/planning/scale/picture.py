"""Draws weak and strong scaling of a simulated run."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dtrain.planning.planned_run import PlannedRun
from dtrain.planning.scale.points import ScalingPoint
from dtrain.planning.scale.report import scale_assumptions
from dtrain.planning.time.prediction import Assumptions, accumulation
from dtrain.planning.time.replay import PURPOSES
from dtrain.tools.tables import plural

_COLORS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#0072B2", "#999999")  # Okabe and Ito's


def draw(path: Path, run: PlannedRun, by_kind: Mapping[bool, Sequence[ScalingPoint]], assumed: Assumptions) -> None:
    """Writes a picture of both scalings, ``by_kind`` of whether the global batch stays, with what they assume."""
    figure = Figure(figsize=(11, 5.2))
    axes = figure.subplots(1, 2)
    for axis, is_strong in zip(axes, (False, True), strict=True):
        points = by_kind[is_strong]
        counts = sorted(point.recorded.run.num_micro_batches for point in points)
        whole = points[-1].recorded.run.config.train.global_batch_size
        kept = f"global batch {whole}" if is_strong else plural(whole // points[-1].ranks, "sample") + " a rank"
        axis.set_title(f"{'strong' if is_strong else 'weak'} scaling: {kept}, {accumulation(counts)}", fontsize=10)
        _bars(axis, points)
    legend = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    style: dict[str, Any] = {"bbox_to_anchor": (0.5, 0.12), "ncols": len(legend), "fontsize": 8, "frameon": False}
    figure.legend(legend.values(), legend.keys(), loc="lower center", **style)
    config = points[0].recorded.run.config
    size = getattr(config.engine, "shard_size", None)
    sharded = f", replicas of {size} ranks" if size else ""
    lines = [f"Simulated: {config.model.name}, {run.device.name}, ZeRO stage {config.engine.zero_stage}{sharded}"]
    lines += [line[0].upper() + line[1:] for line in scale_assumptions(run, [*by_kind[False], *by_kind[True]], assumed)]
    figure.text(0.02, 0.01, textwrap.fill(". ".join(lines) + ".", 165), fontsize=7.5, va="bottom")
    figure.tight_layout(rect=(0, 0.16, 1, 1))
    figure.savefig(path, dpi=110)


def _bars(axis: Axes, points: Sequence[ScalingPoint]) -> None:
    """Draws each step as a bar of its parts, in percent, and the efficiency above it."""
    names = [str(point.ranks) for point in points]
    parts = {
        "compute": [point.step.compute for point in points],
        "slowed by transfers": [point.step.slowed for point in points],
        **{f"wait: {purpose}": [point.step.total(purpose).exposed for point in points] for purpose in PURPOSES},
    }
    bottom = [0.0] * len(points)
    for (name, seconds), color in zip(parts.items(), _COLORS, strict=True):
        if not any(seconds):
            continue
        shares = [100 * s / point.step.seconds for s, point in zip(seconds, points, strict=True)]
        axis.bar(names, shares, bottom=bottom, label=name, color=color, width=0.65)
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    for number, point in enumerate(points):
        step_s = point.step.seconds
        taken = f"{step_s:,.4g} s" if step_s > 2 else f"{1e3 * step_s:,.4g} ms"
        axis.text(number, 101, f"{taken}\n{point.efficiency:.1%}", ha="center", va="bottom", fontsize=8)
    axis.set(ylim=(0, 118), xlabel="ranks", ylabel="share of a step, %")
