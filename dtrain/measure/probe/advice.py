"""Advice from evidence: one precision, a rule for each module that must stay out of it, and a line to paste.

A format is safe if its gap to FP32 is below two units of FP32's own noise. Modules get a rule only if the format is
not safe without it: the worst by the analysis first, each set of rules trained again, and rules that turn out to be
unnecessary dropped. Nothing is switched; the user decides.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from dtrain.measure.probe.evidence import (
    Evidence,
    change_text,
    figures,
    float8_reasons,
    line_of,
    scale_reasons,
    scale_text,
    untested,
)
from dtrain.measure.probe.records import FORWARD, Advice, AdvisedRule, ProductResult, Trial
from dtrain.tools.tables import plural

MAX_RETRAINS = 12
"""Trainings that the search for rules may take for one format."""

_FLOAT8_GAIN = 0.97  # of BF16's time per step that FP8 may take: it costs precision


Retrain = Callable[[str, Mapping[str, str], float | None], Trial]
"""Trains once more from the same start on the same samples.

Takes a format, rules, and a constant loss scale, None for the run's own; returns the trial."""


@dataclass(frozen=True)
class _Choice:
    """A format with the rules and the scale under which it is safe, and its trial."""

    trial: Trial
    rules: tuple[AdvisedRule, ...] = ()
    loss_scale: float | None = None


def advise(evidence: Evidence, retrain: Retrain) -> Advice:
    """Returns the advice that ``evidence`` supports.

    The order: FP8 if its products are real here and faster than BF16; BF16; FP16 with a constant loss scale; then BF16
    and FP16 with rules; TF32; FP32.
    """
    adviser = _Adviser(evidence, retrain)
    choice = adviser.choose()
    if choice is None:
        tried = ", ".join(trial.format for trial in evidence.trials if trial.format != "fp32")
        adviser.reasons.append(f"fp32: no format that was tried ({tried or 'none'}) stays below two noise units")
    precision = choice.trial.format if choice else "fp32"
    rules, scale = (choice.rules, choice.loss_scale) if choice else ((), None)
    all_rules = dict(choice.trial.rules) if choice else {}  # with those that the user gave
    all_rules |= {rule.pattern: rule.format for rule in rules}
    reasons = (*adviser.reasons, *float8_reasons(evidence), *scale_reasons(evidence, scale))
    return Advice(precision, rules, scale, line_of(precision, all_rules, scale), reasons, untested(evidence, scale))


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
            or self._with_rules("bf16")
            or self._with_rules("fp16")
            or self._healthy("tf32")
        )

    def _float8(self) -> _Choice | None:
        fp8, bf16 = self.evidence.trial("fp8"), self.evidence.trial("bf16")
        if fp8 is None:
            return None
        if fp8.ms_per_step is None:
            emulated = f"is emulated on {self.evidence.device}: it brings no speed here"
            failed = f"{self.evidence.describe(fp8)} before its speed can be measured"
            self.reasons.append(f"fp8 {emulated if fp8.failure is None else failed}")
            return None
        if bf16 is not None and bf16.ms_per_step is not None and not _is_faster(fp8, bf16):
            self.reasons.append(f"fp8 is not faster than bf16 here ({_times(fp8, bf16)})")
            return None
        choice = self._healthy("fp8") or self._with_rules("fp8")
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
                return self._accept(_Choice(constant, (), scale), f" at the constant loss scale {scale_text(scale)}")
        if self.evidence.is_off(trial):
            self._rejected[format_name] = trial
            self.reasons.append(f"{format_name} without rules {self.evidence.describe(trial)}")
            return None
        return self._accept(_Choice(trial))

    def _scale(self, format_name: str) -> float | None:
        return self.evidence.analysis.loss_scale if format_name == "fp16" else None

    def _accept(self, choice: _Choice, how: str = "") -> _Choice:
        trial = choice.trial
        rules = f" with {plural(len(choice.rules), 'rule')}" if choice.rules else ""
        cosine = f", cosine of the first gradients {trial.cosine:.4f}" if math.isfinite(trial.cosine) else ""
        self.reasons.append(
            f"{trial.format}{rules}{how} {self.evidence.describe(trial)} (gaps below 2 cannot be told from noise)"
            f"{cosine}"
        )
        return choice

    # -- the search for rules ---------------------------------------------------------------------------------------

    def _with_rules(self, format_name: str) -> _Choice | None:
        """Returns the format with the fewest rules found under which it is safe."""
        before = self._rejected.get(format_name)
        if before is None:
            return None
        scale = self._scale(format_name)
        remaining = _ranked(self.evidence, format_name)
        kept: list[_Candidate] = []
        trials = 0
        safe: Trial | None = None
        while remaining and safe is None and trials < MAX_RETRAINS:
            # twice as many each time: the worst alone first, and few trainings if there are many
            number = max(1, len(kept))
            kept = _outermost([*kept, *remaining[:number]])
            names = {candidate.name for candidate in kept}
            remaining = [candidate for candidate in remaining[number:] if not candidate.is_inside(names)]
            trial = self.retrain(format_name, _patterns(kept), scale)
            trials += 1
            safe = None if self.evidence.is_off(trial) else trial
        self._point_to_code(format_name)
        if safe is None:
            tried = f" with up to {plural(len(kept), 'rule')}" if kept else ""
            self.reasons.append(f"{format_name}{tried} stays two noise units or more from FP32")
            return None
        for candidate in kept[:-1] if len(kept) > 1 else ():
            if trials >= MAX_RETRAINS:
                break
            fewer = [other for other in kept if other is not candidate]
            trial = self.retrain(format_name, _patterns(fewer), scale)
            trials += 1
            if not self.evidence.is_off(trial):
                kept, safe = fewer, trial
        with_rules = f"{self.evidence.describe(safe)} with {plural(len(kept), 'rule')}"
        found = f"{self.evidence.describe(before)} without, {with_rules}"
        rules = tuple(AdvisedRule(s.pattern, s.instead, f"{s.describe()}; {format_name} {found}") for s in kept)
        return self._accept(_Choice(safe, rules, scale))

    def _point_to_code(self, format_name: str) -> None:
        """Names what no rule reaches: code of the model itself, outside of the modules that it calls."""
        own = [r for r in self.evidence.analysis.products if r.format == format_name and not r.module and r.cause]
        for r in own:
            self.reasons.append(
                f"the model's own forward, outside of its modules, is sensitive in {format_name} ({figures(r)}), and "
                f"no rule reaches it: cast its inputs with .float() inside `with dtrain.full_precision():`, or move "
                f"it into a module"
            )


@dataclass(frozen=True)
class _Candidate:
    """A module that may get a rule, with its results."""

    name: str
    kind: str
    instead: str
    score: float
    results: tuple[ProductResult, ...]
    measured: float | None

    @property
    def pattern(self) -> str:
        # Hydra's mappings have no way to write a quote in a key
        return glob.escape(self.name).replace('"', "?").replace("'", "?")

    def is_inside(self, names: Collection[str]) -> bool:
        """Whether a rule for one of ``names`` covers this module."""
        parts = self.name.split(".")
        return any(".".join(parts[:end]) in names for end in range(1, len(parts)))

    def describe(self) -> str:
        worst = max(self.results, key=lambda r: (r.size, -r.sqnr_db))
        measured = "" if self.measured is None else f", {change_text(self.measured)} measured alone"
        return f"{self.kind} '{self.name}': {figures(worst)}{measured}"


def _ranked(evidence: Evidence, format_name: str) -> list[_Candidate]:
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
    candidates = []
    for name, found in results.items():
        if not name:  # a rule for the model itself would keep all of it out
            continue
        forward = measured.get(name, math.fsum(r.size for r in found if r.product in FORWARD))
        score = forward + math.fsum(r.size for r in found if r.product not in FORWARD)
        instead = "bf16" if found[0].format == "fp8" else "fp32"
        kind = analysis.kinds.get(name, "module")
        candidates.append(_Candidate(name, kind, instead, score, tuple(found), measured.get(name)))
    return sorted(candidates, key=lambda s: s.score, reverse=True)


def _outermost(candidates: list[_Candidate]) -> list[_Candidate]:
    """Returns the candidates that no other one's rule covers."""
    names = {candidate.name for candidate in candidates}
    return [candidate for candidate in candidates if not candidate.is_inside(names)]


def _patterns(candidates: Iterable[_Candidate]) -> dict[str, str]:
    return {s.pattern: s.instead for s in candidates}


def _is_faster(fp8: Trial, bf16: Trial) -> bool:
    if fp8.ms_per_step is None or bf16.ms_per_step is None:
        return True  # nothing to compare: FP8 is real, BF16 is not
    return fp8.ms_per_step <= _FLOAT8_GAIN * bf16.ms_per_step


def _times(fp8: Trial, bf16: Trial) -> str:
    return f"{fp8.ms_per_step:.3g} against {bf16.ms_per_step:.3g} ms a step"
