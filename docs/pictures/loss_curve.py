"""Draws docs/pictures/loss.png from the metrics of several runs.

python docs/pictures/loss_curve.py 'one process=runs/a' '2 ranks=runs/b' 'killed and resumed=runs/c' 'FP8=runs/d'
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main(arguments: list[str]) -> None:
    figure, axes = plt.subplots(figsize=(7.5, 3.8), dpi=130, layout="constrained")
    styles = [("-", 4.0, "#9ecae1"), ("--", 1.8, "#08519c"), (":", 2.0, "#d94801"), ("-", 1.2, "#41ab5d")]
    for argument, (style, width, color) in zip(arguments, styles, strict=False):
        label, _, folder = argument.partition("=")
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
        axes.plot(*zip(*losses, strict=True), style, linewidth=width, color=color, label=f"train, {label}")
        validated = [(line["step"], line["val_loss"]) for line in lines if "val_loss" in line]
        axes.plot(*zip(*validated, strict=True), "o", color=color, markersize=width + 3, label=f"validation, {label}")
    axes.set(
        xlabel="step", ylabel="loss (nats per byte)", title="The default: a 3.3M-parameter GPT on Python's own text"
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    figure.savefig(Path(__file__).parent / "loss.png")


if __name__ == "__main__":
    main(sys.argv[1:])
