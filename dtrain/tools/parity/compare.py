"""How far a run has parted from the oracle, and whether that is too far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from dtrain.tools.parity.trajectory import Trajectory

YARDSTICKS = 3.0
"""How many times as far from the oracle as plain PyTorch in the same precision an engine may be, beyond its bound."""

LOSS, SKIP = "loss", "skip"


@dataclass(frozen=True)
class Given:
    """Bounds that the user gave; None: by precision."""

    loss: float | None = None
    weights: float | None = None


@dataclass(frozen=True)
class Bounds:
    """The largest deviation of any loss and of any tensor of weights."""

    loss: float
    weights: float


BOUNDS = {
    "fp32": Bounds(loss=1e-5, weights=5e-5),
    "tf32": Bounds(loss=2e-3, weights=5e-3),
    "fp16": Bounds(loss=2e-3, weights=5e-3),
    "bf16": Bounds(loss=5e-3, weights=5e-2),
    "fp8": Bounds(loss=1e-2, weights=5e-2),
}
"""By precision; see docs/parity.md for the measurements behind them."""


@dataclass(frozen=True)
class Deviations:
    """Of one run from the oracle.

    Attributes:
        loss: of each step, ``|loss - oracle| / |oracle|``.
        grad_norm: likewise.
        weights: by tensor, at the start and after each step: the L2 norm of the difference over that of the way that
            the oracle's tensor goes in the whole run (the farthest that it is from its start). A difference at the
            start counts as infinite.
    """

    loss: list[float]
    grad_norm: list[float]
    weights: dict[str, list[float]]


@dataclass(frozen=True)
class Parting:
    """Where a run first left its bound.

    Attributes:
        step: attempted steps; 0 is the start.
        what: ``loss``; the name of the tensor that is the most times beyond its bound; or ``skip``, where the run
            skipped a step that the oracle takes.
        others: how many more tensors are beyond theirs at that step.
        reason: of a skip.
    """

    step: int
    what: str
    deviation: float = math.inf
    bound: float = 0.0
    others: int = 0
    reason: str | None = None

    def __str__(self) -> str:
        if self.what == SKIP:
            return f"skips step {self.step}, which the oracle takes: {self.reason}"
        what = self.what if self.what == LOSS else f"'{self.what}'"
        others = f", and {self.others} more tensor{'s' if self.others > 1 else ''}" if self.others else ""
        if self.step == 0:
            return f"starts from other weights than the oracle: {what}{others}"
        return (
            f"parts from the oracle at step {self.step}: {what} is off by {self.deviation:.2g}, allowed "
            f"{self.bound:.2g}{others}"
        )


def measure(run: Trajectory, oracle: Trajectory) -> Deviations:
    """The deviations of ``run``, which has as many steps and the same names."""
    ours, theirs = run.curve(), oracle.curve()
    return Deviations(
        loss=[_relative(a.loss, b.loss) for a, b in zip(ours, theirs, strict=True)],
        grad_norm=[_relative(a.grad_norm, b.grad_norm) for a, b in zip(ours, theirs, strict=True)],
        weights={name: _of_tensor(name, run, oracle, len(theirs)) for name in oracle.names()},
    )


def _relative(value: float, reference: float) -> float:
    return _ratio(abs(value - reference), abs(reference))


def _of_tensor(name: str, run: Trajectory, oracle: Trajectory, steps: int) -> list[float]:
    start = oracle.weight(name, 0).double()
    apart, way = [], 0.0
    for step in range(steps + 1):
        reference = oracle.weight(name, step).double()
        way = max(way, float((reference - start).norm()))
        apart.append(float((run.weight(name, step).double() - reference).norm()))
    return [math.inf if apart[0] else 0.0, *(_ratio(distance, way) for distance in apart[1:])]


def _ratio(value: float, reference: float) -> float:
    if reference == 0.0:
        return math.inf if value else 0.0
    return value / reference


@dataclass(frozen=True)
class Limits:
    """What each of the :class:`Deviations` may be; same shapes."""

    loss: list[float]
    weights: dict[str, list[float]]


def limits(bounds: Bounds, oracle: Trajectory, yardstick: Deviations | None, *, given: Given = Given()) -> Limits:
    """A number that was given, else the precision's bound and some yardsticks on top.

    Args:
        bounds: of the precision.
        oracle: tells the steps and the tensors.
        yardstick: of plain PyTorch in that precision; None where it cannot run the model.
        given: takes the place of both.
    """
    steps, names = len(oracle.curve()), oracle.names()

    def stretch(bound: float, number: float | None, deviations: Sequence[float]) -> list[float]:
        if number is not None:
            return [number] * len(deviations)
        return [bound + YARDSTICKS * farthest for farthest in accumulate(map(_nan_to_inf, deviations), max)]

    loss = yardstick.loss if yardstick else [0.0] * steps
    weights = yardstick.weights if yardstick else {name: [0.0] * (steps + 1) for name in names}
    return Limits(
        loss=stretch(bounds.loss, given.loss, loss),
        weights={name: stretch(bounds.weights, given.weights, weights[name]) for name in names},
    )


def shares(deviations: Deviations, allowed: Limits) -> list[dict[str, float]]:
    """At the start and after each step, each deviation over its limit; above 1 is too far. The loss's is ``loss``."""
    rows = []
    for step in range(len(deviations.loss) + 1):
        row = {LOSS: _share(deviations.loss[step - 1], allowed.loss[step - 1])} if step else {}
        rows.append(
            row
            | {name: _share(series[step], allowed.weights[name][step]) for name, series in deviations.weights.items()}
        )
    return rows


def first_parting(deviations: Deviations, allowed: Limits) -> Parting | None:
    """Where the run first left its limits. At one step the loss comes first: it is of the weights before the step."""
    for step, row in enumerate(shares(deviations, allowed)):
        if row.get(LOSS, 0.0) > 1.0:
            return Parting(step, LOSS, deviations.loss[step - 1], allowed.loss[step - 1])
        beyond = [name for name, share in row.items() if share > 1.0]
        if beyond:
            worst = max(beyond, key=lambda name: row[name])
            return Parting(step, worst, deviations.weights[worst][step], allowed.weights[worst][step], len(beyond) - 1)
    return None


def _share(deviation: float, limit: float) -> float:
    if math.isnan(deviation):
        return math.inf
    return 0.0 if limit == math.inf else _ratio(deviation, limit)


def _nan_to_inf(value: float) -> float:
    return math.inf if math.isnan(value) else value
