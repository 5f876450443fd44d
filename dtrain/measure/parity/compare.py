"""Trajectories of runs on disk, and their deviations from the oracle's with their limits."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open
from safetensors.numpy import save_file

from dtrain.config.dump import from_plain
from dtrain.tools.tables import plural

if TYPE_CHECKING:
    from torch import Tensor

NOISE_FACTOR = 3.0
"""Multiple of the noise baseline's deviation that an engine may have on top of its bound."""

LOSS, SKIP = "loss", "skip"
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


@dataclass(frozen=True)
class Bounds:
    """Largest deviation of any loss and of any weight tensor, without the share of the noise baseline."""

    loss: float
    weights: float


BOUNDS = {
    "fp32": Bounds(loss=1e-5, weights=5e-5),
    "tf32": Bounds(loss=2e-3, weights=5e-3),
    "fp16": Bounds(loss=2e-3, weights=5e-3),
    "bf16": Bounds(loss=5e-3, weights=5e-2),
    "fp8": Bounds(loss=1e-2, weights=5e-2),
}
"""Bounds by precision; docs/results/parity.md has the measurements behind them."""


@dataclass(frozen=True)
class Deviations:
    """Deviations of one run from the oracle.

    Attributes:
        loss: ``|loss - oracle| / |oracle|`` of each step.
        grad_norm: the same for the gradient norm.
        weights: by tensor, at the start and after each step: the L2 norm of the difference, divided by the largest
            distance of the oracle's tensor from its start in the whole run. A difference at the start is infinite.
    """

    loss: list[float]
    grad_norm: list[float]
    weights: dict[str, list[float]]


@dataclass(frozen=True)
class Mismatch:
    """The first deviation above its limit.

    Attributes:
        step: attempted steps; 0 is the start.
        quantity: ``loss``; the name of the tensor with the largest deviation relative to its limit; or ``skip`` if the
            run skipped a step that the oracle applied.
        num_others: other tensors above their limits at that step.
        reason: reason of a skip.
    """

    step: int
    quantity: str
    deviation: float = math.inf
    limit: float = 0.0
    num_others: int = 0
    reason: str | None = None

    def __str__(self) -> str:
        if self.quantity == SKIP:
            return f"skips step {self.step}, which the oracle applies: {self.reason}"
        quantity = self.quantity if self.quantity == LOSS else f"'{self.quantity}'"
        others = f", and {plural(self.num_others, 'more tensor')}" if self.num_others else ""
        if self.step == 0:
            return f"starts with different weights than the oracle: {quantity}{others}"
        return (
            f"deviates from the oracle at step {self.step}: {quantity} is off by {self.deviation:.2g}, limit "
            f"{self.limit:.2g}{others}"
        )


def measure(run: Trajectory, oracle: Trajectory) -> Deviations:
    """Returns the deviations of ``run``, which has the same steps and tensor names as the oracle."""
    ours, theirs = run.curve(), oracle.curve()
    return Deviations(
        loss=[relative(a.loss, b.loss) for a, b in zip(ours, theirs, strict=True)],
        grad_norm=[relative(a.grad_norm, b.grad_norm) for a, b in zip(ours, theirs, strict=True)],
        weights={name: _tensor_deviations(name, run, oracle, len(theirs)) for name in oracle.names()},
    )


def relative(value: float, reference: float) -> float:
    """Returns ``|value - reference| / |reference|``."""
    return _ratio(abs(value - reference), abs(reference))


def _tensor_deviations(name: str, run: Trajectory, oracle: Trajectory, steps: int) -> list[float]:
    start = oracle.weight(name, 0).double()
    differences, distance = [], 0.0
    for step in range(steps + 1):
        reference = oracle.weight(name, step).double()
        distance = max(distance, float((reference - start).norm()))
        differences.append(float((run.weight(name, step).double() - reference).norm()))
    return [math.inf if differences[0] else 0.0, *(_ratio(difference, distance) for difference in differences[1:])]


def _ratio(value: float, reference: float) -> float:
    if reference == 0.0:
        return math.inf if value else 0.0
    return value / reference


@dataclass(frozen=True)
class Limits:
    """Limit of each number in ``Deviations``; same shapes."""

    loss: list[float]
    weights: dict[str, list[float]]


def make_limits(
    bounds: Bounds,
    oracle: Trajectory,
    noise: Deviations | None,
    *,
    loss_bound: float | None = None,
    weight_bound: float | None = None,
) -> Limits:
    """Returns ``bound + NOISE_FACTOR * largest noise so far`` for each step.

    Args:
        oracle: gives the steps and the tensor names.
        noise: deviations of the noise baseline; None if plain PyTorch cannot run the model in this precision.
        loss_bound: replaces bound and noise for the loss.
        weight_bound: replaces bound and noise for all tensors.
    """
    steps, names = len(oracle.curve()), oracle.names()

    def series(bound: float, override: float | None, deviations: Sequence[float]) -> list[float]:
        if override is not None:
            return [override] * len(deviations)
        values = (math.inf if math.isnan(value) else value for value in deviations)
        return [bound + NOISE_FACTOR * largest for largest in accumulate(values, max)]

    loss = noise.loss if noise else [0.0] * steps
    weights = noise.weights if noise else {name: [0.0] * (steps + 1) for name in names}
    return Limits(
        loss=series(bounds.loss, loss_bound, loss),
        weights={name: series(bounds.weights, weight_bound, weights[name]) for name in names},
    )


def limit_shares(deviations: Deviations, limits: Limits) -> list[dict[str, float]]:
    """Returns deviation / limit by ``loss`` and tensor name, at the start and after each step; above 1 is too far."""
    rows = []
    for step in range(len(deviations.loss) + 1):
        row = {LOSS: _share(deviations.loss[step - 1], limits.loss[step - 1])} if step else {}
        rows.append(
            row
            | {name: _share(series[step], limits.weights[name][step]) for name, series in deviations.weights.items()}
        )
    return rows


def first_mismatch(deviations: Deviations, limits: Limits) -> Mismatch | None:
    """Returns the first deviation above its limit.

    Within a step the loss comes first, because it was computed from the weights before the step.
    """
    for step, row in enumerate(limit_shares(deviations, limits)):
        if row.get(LOSS, 0.0) > 1.0:
            return Mismatch(step, LOSS, deviations.loss[step - 1], limits.loss[step - 1])
        beyond = [name for name, share in row.items() if share > 1.0]
        if beyond:
            worst = max(beyond, key=lambda name: row[name])
            return Mismatch(step, worst, deviations.weights[worst][step], limits.weights[worst][step], len(beyond) - 1)
    return None


def _share(deviation: float, limit: float) -> float:
    if math.isnan(deviation):
        return math.inf
    return 0.0 if limit == math.inf else _ratio(deviation, limit)
