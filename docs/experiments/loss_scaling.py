"""Does a network that stops learning in FP16 follow FP32 once its loss is scaled?

The detector trains in FP32, and in FP16 without loss scaling, with constant scales, and with the dynamic one.
"""

import sys
from statistics import fmean

from common import BLOCK, COLORS, main, points, train
from networks import Detector

PAPER = (
    "Multibox SSD diverges in FP16 without loss scaling; with a factor of 8 it reaches 77.1 % mAP, in FP32 76.9 % "
    "(sections 3.2 and 4.2)"
)
SCALES = ("none", 8.0, 128.0, 1024.0, 32768.0, "dynamic")
SMALL = {"steps": 20, "seeds": (0,), "scales": ("none", "dynamic")}


def run(steps=300, seeds=(0, 1, 2), scales=SCALES):
    cases = [("fp32", "none"), *(("fp16", scale) for scale in scales)]
    trainings = [train_scaled(precision, scale, steps, seed) for precision, scale in cases for seed in seeds]
    return {"steps": steps, "trainings": trainings}


def train_scaled(precision, scale, steps, seed):
    """Returns a training whose losses are in units of the target's variance."""
    curve = train(Detector(), precision, steps, seed=seed, loss_scale=scale)
    curve["losses"] = [loss / Detector.variance for loss in curve["losses"]]
    curve["final"] /= Detector.variance
    scale = scale if isinstance(scale, str) else f"{scale:g}"
    return {"precision": precision, "loss_scale": scale, "seed": seed, "curve": curve}


def of(result, precision, loss_scale):
    """Returns the curves of all seeds."""
    key = (precision, loss_scale)
    return [item["curve"] for item in result["trainings"] if (item["precision"], item["loss_scale"]) == key]


def final(result, precision, loss_scale):
    """Mean over the seeds."""
    return fmean(curve["final"] for curve in of(result, precision, loss_scale))


def finding(result):
    fp32 = final(result, "fp32", "none")
    unscaled, dynamic = (final(result, "fp16", scale) / fp32 for scale in ("none", "dynamic"))
    return (
        f"In FP16 without loss scaling the detector learns nothing: its loss ends at {unscaled:.0f} "
        f"times FP32's; with the dynamic loss scale at {dynamic:.2f} times"
    )


def table(result):
    columns = ["precision", "loss scale", "final loss / variance", "times FP32", "skipped steps"]
    rows, fp32 = [], final(result, "fp32", "none")
    for key in dict.fromkeys((item["precision"], item["loss_scale"]) for item in result["trainings"]):
        loss = final(result, *key)
        skipped = sum(curve["skipped"] for curve in of(result, *key))
        rows.append([*key, f"{loss:.4f}", f"{loss / fp32:.2f}", f"{skipped}"])
    seeds = len(of(result, "fp32", "none"))
    return f"A detector's regression, {result['steps']} steps, mean of {seeds} seeds", columns, rows


def draw(figure, result):
    figure.set_size_inches(10, 4.6)
    curves, finals = figure.subplots(1, 2, width_ratios=(1.25, 1))
    for axes, draw_panel in ((curves, draw_curves), (finals, draw_finals)):
        axes.set_yscale("log")
        draw_panel(axes, result)
        axes.grid(alpha=0.3, which="both")


def draw_curves(axes, result):
    axes.plot(*points(of(result, "fp32", "none")[0]), color=COLORS["fp32"], alpha=0.4, linewidth=6, label="fp32")
    for scale, dash, color, label in (
        ("none", "-", "#000000", "no scaling"),
        ("8", "--", "#7f3000", "loss scale 8"),
        ("1024", "-.", "#D55E00", "loss scale 1024"),
        ("dynamic", ":", "#E69F00", "dynamic loss scale"),
    ):
        for curve in of(result, "fp16", scale)[:1]:
            axes.plot(*points(curve), dash, color=color, linewidth=1.8, label=f"fp16, {label}")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.text(0, 1.12, "loss of the best constant answer", fontsize=8.5)
    axes.set(xlabel="step", ylabel=f"loss / variance of the targets, means of {BLOCK} steps")
    axes.set_ylim(top=1.7)
    axes.legend(fontsize=8.5, loc="lower left")


def draw_finals(axes, result):
    scales = list(dict.fromkeys(item["loss_scale"] for item in result["trainings"] if item["precision"] == "fp16"))
    for place, scale in enumerate(scales):
        for curve in of(result, "fp16", scale):
            axes.plot(place, curve["final"], "o", color=COLORS["fp16"], markersize=5)
    references = [curve["final"] for curve in of(result, "fp32", "none")]
    axes.axhspan(min(references), max(references), color=COLORS["fp32"], alpha=0.4)
    axes.text(0, max(references) * 1.05, f"fp32, {len(references)} seeds", fontsize=9, color=COLORS["fp32"])
    axes.set_xticks(range(len(scales)), scales)
    axes.set(xlabel="loss scale of FP16", ylabel="final loss / variance, one dot a seed")


if __name__ == "__main__":
    main(sys.modules[__name__])
