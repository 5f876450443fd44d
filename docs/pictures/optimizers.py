"""Draws docs/pictures/optimizers.png: validation losses of several runs.

for o in adamw muon adamw-bf16 lion sgd; do dtrain train optim=$o train.eval_every=20 run_dir=runs/$o; done
python docs/pictures/optimizers.py adamw=runs/adamw muon=runs/muon lion=runs/lion ...
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
    for argument, style in zip(arguments, ("o-", "s-", "^:", "v-", "d-", "x--"), strict=False):
        label, _, folder = argument.rpartition("=")
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        losses = [(line["step"], line["val_loss"]) for line in lines if "val_loss" in line]
        axes.plot(*zip(*losses, strict=True), style, markersize=4, linewidth=1.4, label=f"{label}: {losses[-1][1]:.3f}")
    axes.set(
        xlabel="step",
        ylabel="validation loss (nats per byte)",
        title="A 3.3M-parameter GPT on Python's own text, one seed",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(Path(__file__).parent / "optimizers.png")


if __name__ == "__main__":
    main(sys.argv[1:])
