"""Findings of a sampled step, as metrics, trackers and the console report them."""

from __future__ import annotations

import glob
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dtrain.precision.report import ParameterPrecision, PrecisionReport
from dtrain.precision.rules import rules_override
from dtrain.telemetry.envelope import Departure

_NUM_WORST = 10
_GRADIENT_LIMIT = 0.01  # share of a gradient in FP16 that may lose bits before the console says so
_OPERAND_LIMIT = 0.05  # share of an FP8 operand that may become zero before it does


@dataclass(frozen=True)
class PrecisionFindings:
    """A report, and where the gradients have left the range in which a probe gave its advice."""

    report: PrecisionReport
    departures: tuple[Departure, ...] = ()

    @property
    def step(self) -> int:
        return self.report.step

    def to_dict(self) -> dict[str, Any]:
        """Returns everything, as plain values for JSON."""
        return {**self.report.to_dict(), "departures": [asdict(departure) for departure in self.departures]}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> PrecisionFindings:
        departures = tuple(Departure(**departure) for departure in values["departures"])
        return PrecisionFindings(PrecisionReport.from_dict(values), departures)

    def summary(self) -> dict[str, Any]:
        """Returns the worst parameters and FP8 products, as plain values for a line of metrics."""
        report = self.report
        products = sorted(report.float8, key=lambda own: own.sqnr_db if own.sqnr_db is not None else float("inf"))
        return {
            "applied": report.applied,
            "loss_scale": report.loss_scale,
            "better_scale": report.better_scale,
            "worst": [{"parameter": own.name, "format": own.format, **_numbers(own)} for own in self._worst()],
            "worst_float8": [
                {"module": own.module, "product": own.product, "sqnr_db": own.sqnr_db}
                | {f"underflow_{operand.operand}": operand.underflow for operand in own.operands}
                for own in products[:_NUM_WORST]
            ],
            "departures": len(self.departures),
        }

    def scalars(self) -> dict[str, float]:
        """Returns what a tracker plots: the scales, and the numbers of the worst parameters."""
        report = self.report
        values: dict[str, float | None] = {"loss_scale": report.loss_scale, "better_scale": report.better_scale}
        for own in self._worst():
            values |= {f"{key}/{own.name}": number for key, number in _numbers(own).items()}
        return {key: float(number) for key, number in values.items() if number is not None}

    def _worst(self) -> tuple[ParameterPrecision, ...]:
        return self.report.worst(_NUM_WORST)

    def advice(self) -> tuple[str, str] | None:
        """Returns a key and a message if a format that the run computes in loses much, else None."""
        report = self.report
        lossy = [own for own in report.parameters if own.format == "fp16"]
        worst = max(lossy, key=lambda own: own.shares.subnormal_fp16, default=None)
        if worst is not None and worst.shares.subnormal_fp16 > _GRADIENT_LIMIT:
            return worst.name, _fp16_message(worst, report)
        casts = [(operand.underflow, own, operand) for own in report.float8 for operand in own.operands]
        underflow, product, operand = max(casts, key=lambda cast: cast[0], default=(0.0, None, None))
        if product is None or operand is None or underflow <= _OPERAND_LIMIT:
            return None
        message = (
            f"FP8 flushes {underflow:.1%} of the {operand.operand} of '{product.module}' to zero in {product.product}; "
            f"to keep the module out of FP8: {_rule(product.module, 'bf16')}"
        )
        return product.module, message


def _numbers(own: ParameterPrecision) -> dict[str, float | None]:
    shares, update = own.shares, own.update
    return {
        "zeros": shares.zeros,
        "flushed_fp16": shares.flushed_fp16,
        "recovered_fp16": shares.recovered_fp16,
        "subnormal_fp16": shares.subnormal_fp16,
        "flushed_e4m3": shares.flushed_e4m3,
        "flushed_e5m2": shares.flushed_e5m2,
        "update_ratio": None if update is None else update.ratio,
        "update_lost_bf16": None if update is None else update.lost_bf16,
        "update_lost_fp16": None if update is None else update.lost_fp16,
    }


def _fp16_message(worst: ParameterPrecision, report: PrecisionReport) -> str:
    shares, scale, better = worst.shares, report.loss_scale, report.better_scale
    text = (
        f"{shares.subnormal_fp16:.1%} of the nonzero gradient of '{worst.name}' is below FP16's normal range at loss "
        f"scale {scale:g}, and {shares.zeros:.1%} of it is zero"
    )
    if better is not None and better >= 2 * scale:
        return (
            f"{text}; the largest gradients leave room for a scale of {better:g}, which "
            f"precision.loss_scale.mode=calibrated would choose"
        )
    module = worst.name.rpartition(".")[0]  # a parameter of the model itself is in no module that a rule could name
    rule = f", or {_rule(module, 'fp32')}" if module else ""
    return f"{text}; no larger scale fits the largest gradients: use precision=bf16{rule}"


def _rule(module: str, format_name: str) -> str:
    return shlex.quote(rules_override({glob.escape(module): format_name}))
