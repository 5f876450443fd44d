"""Advice from evidence: one precision, a rule for each module that must stay out of it, and a line to paste.

A format is safe if its gap to FP32 is below two units of FP32's own noise. Modules get a rule only if the format is
not safe without it: the worst by the analysis first, each set of rules trained again, and rules that turn out to be
unnecessary dropped. Nothing is switched; the user decides.
"""

from __future__ import annotations

import glob
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dtrain.tools.probe.records import Advice, Analysis, Flip, Noise, ProductResult, Rule, Trial

MAX_RETRAINS = 12
"""Trainings that the search for rules may take for one format."""

_FLOAT8_GAIN = 0.97  # of BF16's time per step that FP8 may take: it costs precision
_FORWARD = ("fprop", "forward")


class Retrain(Protocol):
    """Trains once more from the same start on the same samples."""

    def __call__(self, format_name: str, rules: Mapping[str, str], loss_scale: float | None = None) -> Trial:
        """Returns the trial of a format under ``rules``; ``loss_scale`` is a constant one, None the run's own."""
        ...


@dataclass(frozen=True)
class Evidence:
    """All that the probe has measured: trials without rules, FP32's among them, and the analysis of the modules."""

    trials: Sequence[Trial]
    noise: Noise
    analysis: Analysis
    flips: Sequence[Flip] = ()
    device_name: str = "this device"

    def trial(self, format_name: str) -> Trial | None:
        """Returns the trial of a format, or None if it was not tried."""
        return next((trial for trial in self.trials if trial.format == format_name and not trial.rules), None)

    @property
    def limit(self) -> float:
        """Smallest gap that counts: the detection limit, but at least FP32's rounding of the loss."""
        fp32 = self.trial("fp32")
        loss = abs(fp32.losses[-1]) if fp32 and fp32.losses else 1.0
        return max(self.noise.detection_limit, 2.0**-20 * loss)

    def units(self, gap: float) -> float:
        """Returns a gap in units of noise."""
        return gap / (self.limit / 2)

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


@dataclass(frozen=True)
class _Choice:
    """A format with the rules and the scale under which it is safe, and its trial."""

    trial: Trial
    rules: tuple[Rule, ...] = ()
    loss_scale: float | None = None


def advise(evidence: Evidence, retrain: Retrain) -> Advice:
    """Returns the advice that ``evidence`` supports.

    The order: FP8 if its products are real here and faster than BF16; BF16; FP16 with a constant loss scale; then BF16
    and FP16 with rules; TF32; FP32.
    """
    adviser = _Adviser(evidence, retrain)
    choice = adviser.choose()
    precision = choice.trial.format if choice else "fp32"
    rules, scale = (choice.rules, choice.loss_scale) if choice else ((), None)
    reasons = (*adviser.reasons, *_float8_reasons(evidence), *_scale_reasons(evidence, scale))
    return Advice(precision, rules, scale, line_of(precision, rules, scale), reasons, _untested(evidence, scale))


def line_of(precision: str, rules: Sequence[Rule], loss_scale: float | None) -> str:
    """Returns the keys of ``dtrain train``, quoted for a shell."""
    keys = [f"precision={precision}"]
    if rules:
        entries = ", ".join(f"{json.dumps(rule.pattern)}: {rule.format}" for rule in rules)
        keys.append(f"precision.rules={{{entries}}}")
    if loss_scale is not None:
        keys += ["precision.loss_scale.mode=static", f"precision.loss_scale.init={_number(loss_scale)}"]
    return " ".join(map(shlex.quote, keys))


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


class _Adviser:
    def __init__(self, evidence: Evidence, retrain: Retrain) -> None:
        self.evidence, self.retrain = evidence, retrain
        self.reasons: list[str] = []
        self._rejected: dict[str, Trial] = {}

    def choose(self) -> _Choice | None:
        return (
            self._float8()
            or self._healthy("bf16")
            or self._healthy("fp16")
            or self._cured("bf16")
            or self._cured("fp16")
            or self._healthy("tf32")
            or self._nothing()
        )

    def _nothing(self) -> None:
        tried = [trial.format for trial in self.evidence.trials if trial.format != "fp32"]
        self.reasons.append(
            f"fp32: no format that was tried ({', '.join(tried) or 'none'}) stays below two noise units"
        )

    def _float8(self) -> _Choice | None:
        fp8, bf16 = self.evidence.trial("fp8"), self.evidence.trial("bf16")
        if fp8 is None:
            return None
        if fp8.ms_per_step is None:
            self.reasons.append(f"fp8 is emulated on {self.evidence.device_name}: it brings no speed here")
            return None
        if bf16 is not None and bf16.ms_per_step is not None and not _is_faster(fp8, bf16):
            self.reasons.append(f"fp8 is not faster than bf16 here ({_times(fp8, bf16)})")
            return None
        choice = self._healthy("fp8") or self._cured("fp8")
        if choice and bf16 is not None and not _is_faster(choice.trial, bf16):
            self.reasons.append(f"fp8 with its rules is not faster than bf16 ({_times(choice.trial, bf16)})")
            return None
        return choice

    def _healthy(self, format_name: str) -> _Choice | None:
        """Returns the format without rules if it is safe so."""
        trial = self.evidence.trial(format_name)
        if trial is None:
            return None
        scale = self._scale(format_name)
        if scale is not None:
            constant = self.retrain(format_name, {}, scale)
            if not self.evidence.is_off(constant):
                return self._accept(_Choice(constant, (), scale), f" at the constant loss scale {_number(scale)}")
        if self.evidence.is_off(trial):
            self._rejected[format_name] = trial
            self.reasons.append(f"{format_name} without rules {self.evidence.describe(trial)}")
            return None
        return self._accept(_Choice(trial))

    def _scale(self, format_name: str) -> float | None:
        return self.evidence.analysis.loss_scale if format_name == "fp16" else None

    def _accept(self, choice: _Choice, how: str = "") -> _Choice:
        trial, units = choice.trial, self.evidence.units
        rules = f" with {_plural(len(choice.rules), 'rule')}" if choice.rules else ""
        cosine = f", cosine of the first gradients {trial.cosine:.4f}" if math.isfinite(trial.cosine) else ""
        self.reasons.append(
            f"{trial.format}{rules}{how} {self.evidence.describe(trial)} (gaps below 2 cannot be told from noise)"
            f"{cosine}"
        )
        assert units(trial.gap) < 2
        return choice

    # -- the search for rules ---------------------------------------------------------------------------------------

    def _cured(self, format_name: str) -> _Choice | None:
        """Returns the format with the fewest rules found under which it is safe."""
        before = self._rejected.get(format_name)
        if before is None:
            return None
        scale = self._scale(format_name)
        remaining = _ranked(self.evidence, format_name)
        kept: list[_Suspect] = []
        trials = 0
        cured: Trial | None = None
        while remaining and cured is None and trials < MAX_RETRAINS:
            # twice as many each time: the worst alone first, and few trainings if there are many
            more = remaining[: max(1, len(kept))]
            remaining = [s for s in remaining[len(more) :] if not any(s.is_inside(other) for other in more)]
            kept = [s for s in kept if not any(s.is_inside(other) for other in more)] + more
            trial = self.retrain(format_name, _patterns(kept), scale)
            trials += 1
            cured = None if self.evidence.is_off(trial) else trial
        self._point_to_code(format_name)
        if cured is None:
            tried = f" with up to {_plural(len(kept), 'rule')}" if kept else ""
            self.reasons.append(f"{format_name}{tried} stays two noise units or more from FP32")
            return None
        for suspect in kept[:-1] if len(kept) > 1 else ():
            if trials >= MAX_RETRAINS:
                break
            fewer = [other for other in kept if other is not suspect]
            trial = self.retrain(format_name, _patterns(fewer), scale)
            trials += 1
            if not self.evidence.is_off(trial):
                kept, cured = fewer, trial
        found = f"{self.evidence.describe(before)} without, {self.evidence.describe(cured)} with {_plural(len(kept), 'rule')}"
        rules = tuple(Rule(s.pattern, s.instead, f"{s.describe()}; {format_name} {found}") for s in kept)
        return self._accept(_Choice(cured, rules, scale))

    def _point_to_code(self, format_name: str) -> None:
        """Names what no rule reaches: code of the model itself, outside of the modules that it calls."""
        own = [r for r in self.evidence.analysis.products if r.format == format_name and not r.module and r.cause]
        for r in own:
            self.reasons.append(
                f"the model's own forward, outside of its modules, is sensitive in {format_name} ({_figures(r)}), and no "
                f"rule reaches it: cast its inputs with .float() inside `with dtrain.full_precision():`, or move it into "
                f"a module"
            )


@dataclass(frozen=True)
class _Suspect:
    """A module that may get a rule, with its results."""

    name: str
    kind: str
    instead: str
    score: float
    results: tuple[ProductResult, ...]
    measured: float | None

    @property
    def pattern(self) -> str:
        return glob.escape(self.name)

    def is_inside(self, other: _Suspect) -> bool:
        """Whether the rule of ``other`` covers this module."""
        return self.name.startswith(f"{other.name}.")

    def describe(self) -> str:
        worst = max(self.results, key=lambda r: (_size(r.predicted), -r.sqnr_db))
        measured = "" if self.measured is None else f", {_change(self.measured)} measured alone"
        return f"{self.kind} '{self.name}': {_figures(worst)}{measured}"


def _ranked(evidence: Evidence, format_name: str) -> list[_Suspect]:
    """Returns the modules that a rule could keep out of the format, worst first."""
    analysis = evidence.analysis
    results: dict[str, list[ProductResult]] = {}
    for r in analysis.products:
        if r.format == format_name:
            results.setdefault(r.module, []).append(r)
    if format_name == "fp8":  # the rest computes in BF16 there
        own = set(results)
        for r in analysis.products:
            if r.format == "bf16" and r.module not in own:
                results.setdefault(r.module, []).append(r)
    measured = {f.module: f.measured for f in evidence.flips if f.format == format_name}
    suspects = []
    for name, found in results.items():
        if not name:  # a rule for the model itself would keep all of it out
            continue
        forward = measured.get(name, _total(r.predicted for r in found if r.product in _FORWARD))
        score = _size(forward) + _total(r.predicted for r in found if r.product not in _FORWARD)
        instead = "bf16" if found[0].format == "fp8" else "fp32"
        kind = analysis.kinds.get(name, "module")
        suspects.append(_Suspect(name, kind, instead, score, tuple(found), measured.get(name)))
    return sorted(suspects, key=lambda s: s.score, reverse=True)


def _patterns(suspects: Iterable[_Suspect]) -> dict[str, str]:
    return {s.pattern: s.instead for s in suspects}


def _total(values: Iterable[float]) -> float:
    return math.fsum(map(_size, values))


def _size(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _figures(r: ProductResult) -> str:
    if r.sqnr_db == -math.inf:
        return f"{r.product} in {r.format} is not finite (range)"
    parts = [f"{r.product} in {r.format} has {r.sqnr_db:.0f} dB"]
    if r.cause:
        parts[0] += f" ({r.cause})"
    if r.underflow >= 5e-4:
        parts.append(f"{r.underflow:.1%} of its operands become zero")
    if r.saturation >= 5e-4:
        parts.append(f"{r.saturation:.1%} overflow")
    return ", ".join([*parts, f"predicted change of the loss {_change(r.predicted)}"])


def _change(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else "not finite"


def _is_faster(fp8: Trial, bf16: Trial) -> bool:
    if fp8.ms_per_step is None or bf16.ms_per_step is None:
        return True  # nothing to compare: FP8 is real, BF16 is not
    return fp8.ms_per_step <= _FLOAT8_GAIN * bf16.ms_per_step


def _times(fp8: Trial, bf16: Trial) -> str:
    return f"{fp8.ms_per_step:.3g} against {bf16.ms_per_step:.3g} ms a step"


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _float8_reasons(evidence: Evidence) -> list[str]:
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


def _scale_reasons(evidence: Evidence, scale: float | None) -> list[str]:
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
        f"without a loss scale FP16 loses gradients by range in {_plural(len(lost), 'product')}, most in '{r.module}' "
        f"({r.product}: {r.underflow:.0%} of its operands become zero, {r.sqnr_db:.0f} dB); at the constant scale "
        f"{_number(analysis.loss_scale)}, the largest power of two with a margin of 8 over the largest gradient, it "
        f"{verb} {at_scale.underflow:.0%} and {at_scale.sqnr_db:.0f} dB"
    ]


def _untested(evidence: Evidence, scale: float | None) -> tuple[str, ...]:
    steps = max((len(trial.losses) for trial in evidence.trials), default=0)
    items = [
        f"more than {steps} steps: gaps below {evidence.limit:.2g} in the loss ({evidence.limit / 2:.2g} is one noise "
        f"unit), and those that grow later",
        "other learning rates, schedules, batch sizes and data",
        "several ranks, and reduction of gradients in 16 bits",
        f"other devices and kernels than those of {evidence.device_name}",
    ]
    if scale is not None:
        items.append(
            "whether gradients outgrow the constant loss scale later; precision.loss_scale.mode=dynamic follows"
        )
    emulated = [t.format for t in evidence.trials if t.ms_per_step is None]
    if emulated:
        items.append(f"the speed of {', '.join(emulated)}, emulated here")
    for name, reason in evidence.analysis.unexamined.items():
        items.append(f"'{name}' by itself: {reason}")
    return tuple(items)
