"""Trajectory of one training run on disk: its curve, and its weights at the start and after each step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open
from safetensors.numpy import save_file

if TYPE_CHECKING:  # the bounds of a comparison are read without it
    from torch import Tensor

from dtrain.config.dump import from_plain

_CURVE = "curve.jsonl"


@dataclass(frozen=True)
class Point:
    """One attempted step.

    Attributes:
        loss: mean over the global batch.
        grad_norm: L2 norm of the whole gradient before clipping.
        reason: reason of a skip; None if the step was applied.
        loss_scale: loss scale of this step's backward.
    """

    loss: float
    grad_norm: float
    reason: str | None = None
    loss_scale: float = 1.0


class Trajectory:
    """Reads and writes a trajectory: 4 bytes a parameter for the start and for each step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def start(self, weights: Mapping[str, Tensor]) -> None:
        """Writes the weights before the first step: FP32 on the CPU."""
        self._folder.mkdir(parents=True)
        self._write(0, weights)

    def add(self, point: Point, weights: Mapping[str, Tensor]) -> None:
        with (self._folder / _CURVE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(point)) + "\n")
        self._write(len(self.curve()), weights)

    def curve(self) -> list[Point]:
        lines = (self._folder / _CURVE).read_text(encoding="utf-8").splitlines()
        return [from_plain(Point, json.loads(line)) for line in lines]

    def names(self) -> list[str]:
        with safe_open(self._path(0), framework="pt") as file:
            return sorted(file.keys())

    def weight(self, name: str, step: int) -> Tensor:
        """Returns one parameter after ``step`` steps; 0 is the start."""
        with safe_open(self._path(step), framework="pt") as file:
            value: Tensor = file.get_tensor(name)
            return value

    def _write(self, step: int, weights: Mapping[str, Tensor]) -> None:
        save_file({name: weight.contiguous().numpy() for name, weight in weights.items()}, self._path(step))

    def _path(self, step: int) -> Path:
        return self._folder / f"weights-{step:05d}.safetensors"
