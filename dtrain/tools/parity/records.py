"""What ``dtrain parity`` found, and its JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dtrain.telemetry.metrics import finite, write_atomically
from dtrain.tools.parity.compare import Deviations, Limits, Parting, shares
from dtrain.tools.parity.trajectory import Point


@dataclass(frozen=True)
class Worst:
    """The deviation that comes nearest to its limit, or is the farthest beyond it.

    Attributes:
        step: attempted steps; 0 is the start.
        what: ``loss``, or the name of a tensor.
        share: the deviation over its limit; above 1 is too far.
    """

    step: int
    what: str
    deviation: float
    share: float


@dataclass(frozen=True)
class EngineResult:
    """One engine.

    Attributes:
        curve: of its attempted steps.
        deviations: from the oracle that skips the same steps; None where it failed.
        allowed: what each of them may be.
        parting: where it first went too far.
        failure: why it did not run to the end, or cannot be compared.
    """

    engine: str
    zero_stage: int
    seconds: float
    curve: list[Point] = field(default_factory=list)
    deviations: Deviations | None = None
    allowed: Limits | None = None
    parting: Parting | None = None
    failure: str | None = None

    @property
    def agrees(self) -> bool:
        """Whether it ran to the end within its limits."""
        return self.failure is None and self.parting is None

    @property
    def verdict(self) -> str:
        """One clause for people."""
        if self.failure is not None:
            return f"failed: {self.failure}"
        return str(self.parting) if self.parting is not None else "agrees with the oracle"

    def worst(self, *, of_loss: bool) -> Worst | None:
        """Of the losses, or of the weights; None where it failed."""
        if self.deviations is None or self.allowed is None:
            return None
        found = Worst(0, "", 0.0, -1.0)
        for step, row in enumerate(shares(self.deviations, self.allowed)):
            for what, share in row.items():
                if (what not in self.deviations.weights) == of_loss and share > found.share:
                    series = self.deviations.loss if of_loss else self.deviations.weights[what]
                    found = Worst(step, what, series[step - 1 if of_loss else step], share)
        return found


@dataclass(frozen=True)
class Report:
    """One run of ``dtrain parity``.

    Attributes:
        command: what was typed.
        date: local, ISO 8601.
        precision: of the engines, resolved.
        num_parameters: trained ones.
        config: the resolved configuration.
        oracle: its curve.
        yardstick: the curve of plain PyTorch in that precision; empty where it cannot run the model.
        yardstick_deviations: of its losses and weights from the oracle.
        yardstick_failure: why there is none.
        engines: in the order in which they ran.
        left_out: engines that were not asked for and cannot do this here, with the reason.
    """

    command: str
    date: str
    precision: str
    num_parameters: int
    config: dict[str, Any]
    oracle: list[Point]
    yardstick: list[Point]
    yardstick_deviations: Deviations | None
    yardstick_failure: str | None
    engines: list[EngineResult]
    left_out: dict[str, str]

    @property
    def agrees(self) -> bool:
        """Whether all engines do."""
        return all(result.agrees for result in self.engines)


def write_report(path: Path, report: Report) -> None:
    """Writes ``report`` as JSON, whole or not at all; numbers that are not finite become null."""
    values = asdict(report)
    for entry, result in zip(values["engines"], report.engines, strict=True):
        entry["verdict"] = result.verdict
    values["agrees"] = report.agrees
    write_atomically(path, json.dumps(finite(values), indent=1, allow_nan=False) + "\n")
