"""Progress of a run, from the lines of its ``metrics.jsonl``. Imports no torch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from dtrain.checkpoint.directory import committed_checkpoints, step_of
from dtrain.telemetry.metrics import METRIC
from dtrain.telemetry.texts import clean

_VALIDATION_LOSSES = ("val_loss", "val_loss_ema")
_OF_APPLIED_STEPS = ("loss", "lr", "grad_norm")
_CURVE_POINTS = 512
_ETA_WINDOWS = 16
_STEP_LIMIT = 1 << 53


class BoundedCurve:
    """The losses of a run in a bounded number of points, each the mean of the same number of logged losses.

    Attributes:
        low: the lowest loss; infinite before the first.
        high: the highest one.
    """

    def __init__(self) -> None:
        self.low, self.high = math.inf, -math.inf
        self._points: list[float] = []
        self._stride = 1
        self._begun: list[float] = []  # losses of the next point

    def add(self, loss: float) -> None:
        self.low, self.high = min(self.low, loss), max(self.high, loss)
        self._begun.append(loss)
        if len(self._begun) < self._stride:
            return
        self._points.append(_mean(self._begun))
        self._begun = []
        if len(self._points) == _CURVE_POINTS:
            self._points = _binned(self._points, _CURVE_POINTS // 2)
            self._stride *= 2

    def sampled(self, width: int) -> list[float]:
        """Returns at most ``width`` points over the whole run."""
        begun = self._begun
        points = self._points + ([_mean(begun)] if begun else [])
        return _binned(points, width) if len(points) > width else points


class Skip(NamedTuple):
    """A skipped step; the texts are without secrets and control characters."""

    step: int
    reason: str
    culprit: str


class Saved(NamedTuple):
    """A committed checkpoint; ``saved_at`` is in seconds since the epoch."""

    step: int
    saved_at: float


class RunProgress:
    """Takes the lines of a run in their order; a field that a line lacks, or whose value is none, is left as it was.

    Attributes:
        total_steps: None if unknown.
        unit: what counts in the loss, ``tokens`` or ``samples``.
        step: the last logged one.
        loss: the curve of the training loss.
        val_losses: of the last validation, by name; None is not finite.
        validated_step: its step.
        skip: the last skipped step.
    """

    def __init__(self, total_steps: int | None, step: int = 0) -> None:
        self.total_steps = total_steps
        self.unit = "tokens"
        self.step = step
        self.loss = BoundedCurve()
        self.val_losses: Mapping[str, float | None] = {}
        self.validated_step = 0
        self.skip: Skip | None = None
        self._numbers: dict[str, float] = {}
        self._step_ms: deque[float] = deque(maxlen=_ETA_WINDOWS)
        self._compiles = True

    def start(self) -> None:
        """Begins a new process of the run: the first step that it logs includes its compilation."""
        self._step_ms.clear()
        self._compiles = True

    def number(self, name: str) -> float | None:
        """Returns the last value of a field of ``dtrain.telemetry.metrics.StepMetrics``."""
        return self._numbers.get(name)

    def add(self, line: Mapping[str, Any]) -> None:
        """Takes a line of any kind; one that no run writes is left out."""
        step = line.get("step")
        if type(step) is not int or not 0 <= step < _STEP_LIMIT:
            return
        if "val_loss" in line:
            names = [name for name in line if name in _VALIDATION_LOSSES or METRIC.fullmatch(name)]
            self.val_losses = {name: _number(line[name]) for name in names}
            self.validated_step = step
        elif "applied" in line:
            self._add_training(step, line)

    @property
    def has_lines(self) -> bool:
        return bool(self._numbers)

    def eta_s(self) -> float | None:
        """Returns seconds of training to the last step, without evaluation and saving; None without a basis.

        The basis is the median of the step times of the last logged windows, without the first, which compiles.
        """
        times = list(self._step_ms)
        if not times or self.total_steps is None or self.step >= self.total_steps:
            return None
        return median(times) / 1000 * (self.total_steps - self.step)

    def _add_training(self, step: int, line: Mapping[str, Any]) -> None:
        self.step = step
        numbers = {name: number for name, value in line.items() if (number := _number(value)) is not None}
        if not line["applied"]:
            self.skip = Skip(step, clean(line.get("reason")), clean(line.get("culprit")))
            for name in _OF_APPLIED_STEPS:
                numbers.pop(name, None)
        elif "loss" in numbers:
            self.loss.add(numbers["loss"])
        self._numbers.update(numbers)
        if self._compiles:
            self._compiles = False
        elif "step_ms" in numbers:
            self._step_ms.append(numbers["step_ms"])


def last_checkpoint(checkpoints: Path) -> Saved | None:
    """Returns the newest committed checkpoint of a directory, or None if there is none or it cannot be read."""
    try:
        newest = committed_checkpoints(checkpoints)[-1]
        return Saved(step_of(newest), newest.stat().st_mtime)
    except (OSError, IndexError):
        return None


def _number(value: object) -> float | None:
    """Returns a finite number as float; None for anything else."""
    if type(value) not in (int, float):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _mean(values: Sequence[float]) -> float:
    return sum(value / len(values) for value in values)


def _binned(points: Sequence[float], width: int) -> list[float]:
    edges = [index * len(points) // width for index in range(width + 1)]
    return [_mean(points[start:stop]) for start, stop in pairwise(edges)]
