"""Texts of advice: the evidence in words, the line to paste, and what was not tested."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtrain.measure.noise import DETECTION_LIMIT, Noise
from dtrain.measure.probe.records import Analysis, Flip, ProductResult, Trial
from dtrain.precision.rules import rules_override
from dtrain.tools.tables import plural


@dataclass(frozen=True)
class Evidence:
    """Measurements that advice is based on.

    Attributes:
        trials: FP32's first, then the other formats', without rules of the advice.
        noise: defines the unit of gaps.
        analysis: of the modules.
        flips: modules that were run alone in a format.
        device: its name.
    """

    trials: Sequence[Trial]
    noise: Noise
    analysis: Analysis
    flips: Sequence[Flip] = ()
    device: str = "this device"

    def trial(self, format_name: str) -> Trial | None:
        """Returns the trial of a format with the user's own rules, or None if it was not tried."""
        return next((trial for trial in self.trials if trial.format == format_name), None)

    @property
    def unit(self) -> float:
        """Returns the unit of gaps: FP32's noise, but at least its rounding of the loss."""
        fp32 = self.trial("fp32")
        loss = abs(fp32.losses[-1]) if fp32 and fp32.losses else 1.0
        return max(self.noise.unit, 2.0**-21 * loss)

    @property
    def limit(self) -> float:
        """Returns the smallest gap that counts."""
        return DETECTION_LIMIT * self.unit

    def units(self, gap: float) -> float:
        """Returns a gap in units of noise."""
        return gap / self.unit

    def is_off(self, trial: Trial) -> bool:
        """Whether a trial failed, skipped more than it trained, or ended at least two units of noise above FP32."""
        skips_too_much = trial.skipped > max(8, len(trial.losses))
        return trial.failure is not None or skips_too_much or not trial.gap < self.limit

    def describe(self, trial: Trial) -> str:
        """Returns how a trial ended, in units of noise."""
        if trial.failure is not None:
            return f"fails ({trial.failure})"
        if not math.isfinite(trial.gap):
            return "ends with a loss that is not finite"
        return f"ends {self.units(trial.gap):+.1f} noise units from FP32"


def line_of(precision: str, rules: Mapping[str, str], loss_scale: float | None) -> str:
    """Returns the keys of ``dtrain train``, quoted for a shell."""
    keys = [f"precision={precision}"]
    if rules:
        keys.append(rules_override(rules))
    if loss_scale is not None:
        keys += ["precision.loss_scale.mode=static", f"precision.loss_scale.init={scale_text(loss_scale)}"]
    return " ".join(map(shlex.quote, keys))


def scale_text(value: float) -> str:
    """Returns a loss scale as a key takes it."""
    return str(int(value)) if value == int(value) else repr(value)


def figures(r: ProductResult) -> str:
    """Returns the result of a product in words."""
    if r.sqnr_db == -math.inf:
        return f"{r.product} in {r.format} is not finite (range)"
    parts = [f"{r.product} in {r.format} has {r.sqnr_db:.0f} dB"]
    if r.cause:
        parts[0] += f" ({r.cause})"
    if r.underflow >= 5e-4:
        parts.append(f"{r.underflow:.1%} of its operands become zero")
    if r.saturation >= 5e-4:
        parts.append(f"{r.saturation:.1%} overflow")
    return ", ".join([*parts, f"predicted change of the loss {change_text(r.predicted)}"])


def change_text(value: float) -> str:
    """Returns a change of the loss in words."""
    return f"{value:.1e}" if math.isfinite(value) else "not finite"


def float8_reasons(evidence: Evidence) -> list[str]:
    """Names the Linears that FP8 leaves out by itself."""
    if evidence.trial("fp8") is None:
        return []
    by_reason: dict[str, list[str]] = {}
    for name, reason in evidence.analysis.blocks_float8.items():
        if reason.startswith("too small"):
            by_reason.setdefault(reason, []).append(name)
    return [
        f"stay in bf16 under precision=fp8 without any rule ({reason}): {', '.join(names)}"
        for reason, names in by_reason.items()
    ]


def scale_reasons(evidence: Evidence, scale: float | None) -> list[str]:
    """Says what FP16 loses without a loss scale, and what a constant one recovers."""
    analysis = evidence.analysis
    if analysis.loss_scale is None:
        return []
    scaled = {(r.module, r.product): r for r in analysis.products if r.format == "fp16"}
    lost = [
        (r, scaled[r.module, r.product])
        for r in analysis.unscaled
        if r.cause == "range" and (r.module, r.product) in scaled
    ]
    if not lost:
        return []
    r, at_scale = max(lost, key=lambda pair: pair[0].predicted)
    verb = "is" if scale is not None else "would be"
    return [
        f"without a loss scale FP16 loses gradients by range in {plural(len(lost), 'product')}, most in '{r.module}' "
        f"({r.product}: {r.underflow:.0%} of its operands become zero, {r.sqnr_db:.0f} dB); at the constant scale "
        f"{scale_text(analysis.loss_scale)}, the largest power of two with a margin of 8 over the largest gradient, it "
        f"{verb} {at_scale.underflow:.0%} and {at_scale.sqnr_db:.0f} dB"
    ]


def untested(evidence: Evidence, scale: float | None) -> tuple[str, ...]:
    """Returns what no part of the probe has tried."""
    steps = max((len(trial.losses) for trial in evidence.trials), default=0)
    items = [
        f"more than {steps} steps: gaps below {evidence.limit:.2g} in the loss ({evidence.unit:.2g} is one noise "
        f"unit), and those that grow later",
        "other learning rates, schedules, batch sizes and data",
        "several ranks, and reduction of gradients in 16 bits",
        f"other devices and kernels than those of {evidence.device}",
    ]
    if scale is not None:
        items.append(
            "whether gradients outgrow the constant loss scale later; precision.loss_scale.mode=dynamic follows"
        )
    emulated = [t.format for t in evidence.trials if t.ms_per_step is None and t.failure is None]
    if emulated:
        items.append(f"the speed of {', '.join(emulated)}, emulated here")
    for name, reason in evidence.analysis.unexamined.items():
        items.append(f"'{name}' by itself: {reason}")
    return tuple(items)
