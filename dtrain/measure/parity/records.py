"""Result of ``dtrain parity`` and its JSON."""

from __future__ import annotations

from dataclasses import dataclass, field

from dtrain.measure.parity.compare import Deviations, Limits, Mismatch, Point, limit_shares
from dtrain.measure.record import RecordHead

REPORT_FILE = "report.json"


@dataclass(frozen=True)
class WorstDeviation:
    """The deviation that is largest relative to its limit.

    Attributes:
        step: attempted steps; 0 is the start.
        quantity: ``loss``, or the name of a tensor.
        share: deviation / limit; above 1 is too far.
    """

    step: int
    quantity: str
    deviation: float
    share: float


@dataclass(frozen=True)
class EngineResult:
    """Result of one engine.

    Attributes:
        curve: its attempted steps.
        deviations: deviations from the oracle that skips the same steps; None if the engine failed.
        failure: reason why the engine did not run to the end, or cannot be compared.
    """

    engine: str
    zero_stage: int
    seconds: float
    curve: list[Point] = field(default_factory=list)
    deviations: Deviations | None = None
    limits: Limits | None = None
    mismatch: Mismatch | None = None
    failure: str | None = None

    @property
    def agrees(self) -> bool:
        return self.failure is None and self.mismatch is None

    @property
    def summary(self) -> str:
        if self.failure is not None:
            return f"failed: {self.failure}"
        return str(self.mismatch) if self.mismatch is not None else "agrees with the oracle"

    def worst(self, *, of_loss: bool) -> WorstDeviation | None:
        """Returns the worst deviation of the loss, or of the weights; None if the engine failed."""
        if self.deviations is None or self.limits is None:
            return None
        found = WorstDeviation(0, "", 0.0, -1.0)
        for step, row in enumerate(limit_shares(self.deviations, self.limits)):
            for quantity, share in row.items():
                if (quantity not in self.deviations.weights) == of_loss and share > found.share:
                    series = self.deviations.loss if of_loss else self.deviations.weights[quantity]
                    found = WorstDeviation(step, quantity, series[step - 1 if of_loss else step], share)
        return found


@dataclass(frozen=True, kw_only=True)
class ParityReport(RecordHead):
    """Result of one run of ``dtrain parity``.

    Attributes:
        precision: resolved precision of the engines.
        num_parameters: trained parameters.
        noise_baseline: curve of plain PyTorch in that precision; empty if it cannot run the model.
        left_out: engines that were not requested and cannot run here, with the reason.
    """

    precision: str
    num_parameters: int
    oracle: list[Point]
    noise_baseline: list[Point]
    noise_deviations: Deviations | None
    noise_failure: str | None
    engines: list[EngineResult]
    left_out: dict[str, str]

    @property
    def agrees(self) -> bool:
        return all(result.agrees for result in self.engines)
