"""Draws docs/pictures/tasks.png: the samples of three runs beside each other.

for e in glyphs diffusion regression; do dtrain train experiment=$e run_dir=runs/$e; done
python docs/pictures/tasks.py runs/glyphs runs/diffusion runs/regression
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def title(folder: Path) -> str:
    summary = json.loads((folder / "summary.json").read_text())
    metrics = summary["val_metrics"]
    if "val_accuracy" in metrics:
        return f"experiment=glyphs: {100 * metrics['val_accuracy']:.1f} % of 62 characters\nin fonts it has never seen"
    if "val_rmse" in metrics:
        return f"experiment=regression: error {metrics['val_rmse']:.2f},\nwhere the noise alone is 1.00"
    return "experiment=diffusion: digits\nthat the model has drawn"


def main(folders: list[str]) -> None:
    figure, all_axes = plt.subplots(1, len(folders), figsize=(12, 4.4), dpi=130, layout="constrained")
    for axes, folder in zip(all_axes, map(Path, folders), strict=True):
        axes.imshow(plt.imread(folder / "sample.png"))
        axes.set_title(title(folder), fontsize=11)
        axes.set_anchor("N")
        axes.axis("off")
    figure.savefig(Path(__file__).parent / "tasks.png")


if __name__ == "__main__":
    main(sys.argv[1:])
