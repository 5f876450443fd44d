"""Draws docs/pictures/states.png: validation losses with compact states, beside those of other seeds.

keys="model.num_layers=2 model.hidden_dim=64 model.num_heads=4 model.max_seq_len=64 train.micro_batch_size=4"
dtrain train $keys train.eval_every=20 run_dir=runs/full
dtrain train $keys train.eval_every=20 run_dir=runs/remainder engine.master=remainder        (and so on)
python docs/pictures/states.py --collect docs/results/states/cpu.json defaults=runs/full remainder=runs/remainder
python docs/pictures/states.py docs/results/states/cpu.json

The first run is the one that the others are compared with.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def collect(target: Path, arguments: list[str]) -> None:
    """Writes the losses of runs, given as label=folder, with their keys, host and versions."""
    runs: dict[str, Any] = {}
    for argument in arguments:
        label, _, folder = argument.partition("=")
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        runs[label] = {
            "train": [[line["step"], line["loss"]] for line in lines if "loss" in line],
            "validation": [[line["step"], line["val_loss"]] for line in lines if "val_loss" in line],
            "memory": json.loads((Path(folder) / "summary.json").read_text())["memory"],
        }
    environment = json.loads((Path(arguments[0].partition("=")[2]) / "environment.json").read_text())
    target.write_text(json.dumps({"environment": environment, "runs": runs}, indent=1) + "\n")


def draw(source: Path) -> None:
    runs = json.loads(source.read_text())["runs"]
    figure, (losses, gaps) = plt.subplots(1, 2, figsize=(9.5, 3.8), dpi=130, layout="constrained")
    (_, first), *_ = runs.items()
    for number, ((label, run), style) in enumerate(zip(runs.items(), ("-", "o--", "s--", "^--", "v--"), strict=False)):
        color = "0.75" if label.startswith("seed") else f"C{number}"
        steps, values = zip(*run["validation"], strict=True)
        losses.plot(steps, values, style, color=color, markersize=4, linewidth=1.4, label=f"{label}: {values[-1]:.3f}")
        if run is not first:
            distance = [abs(a - b) for a, (_, b) in zip(values, first["validation"], strict=True)]
            gaps.semilogy(steps, distance, style, color=color, markersize=4, linewidth=1.4, label=label)
    losses.set(
        xlabel="step", ylabel="validation loss (nats per byte)", title="A GPT of two blocks on Python's own text"
    )
    gaps.set(xlabel="step", ylabel="distance from the defaults", title="Distance from the defaults")
    for axes in (losses, gaps):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(Path(__file__).parent / "states.png")


if __name__ == "__main__":
    if sys.argv[1] == "--collect":
        collect(Path(sys.argv[2]), sys.argv[3:])
    else:
        draw(Path(sys.argv[1]))
