"""Tables and sentences of a report, for the terminal and for the page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dtrain.measure.probe.records import Flip, Trial
from dtrain.measure.probe.report import ConstantScale, ProbeReport
from dtrain.tools.tables import Table, plural


def trial_table(report: ProbeReport) -> Table:
    """Returns the table of formats, with the trials that the advice added."""
    columns = ("format", "ms/step", "memory", "loss", "gap", "in noise", "cosine", "skipped", "loss scale", "result")
    rows = [_trial_row(report, trial) for trial in [*report.trials, *report.retrained]]
    return Table(f"Formats: {report.num_parameters:,} parameters on {report.device}, {report.batch}", columns, rows)


def _trial_row(report: ProbeReport, trial: Trial) -> tuple[str, ...]:
    has_gap = math.isfinite(trial.gap)
    is_reference = trial is report.trials[0]
    return (
        trial_name(report, trial),
        "" if trial.ms_per_step is None else f"{trial.ms_per_step:.1f}",
        f"{trial.memory / 1e6:,.1f} MB" if trial.memory else "",
        f"{trial.final_loss:.4f}" if has_gap else "-",
        f"{trial.gap:+.4f}" if has_gap and not is_reference else "-",
        f"{report.units(trial.gap):+.2f}" if has_gap and not is_reference else "-",
        f"{trial.cosine:.6f}" if math.isfinite(trial.cosine) else "-",
        str(trial.skipped),
        f"{trial.loss_scale:g}",
        "reference" if is_reference else outcome(report, trial),
    )


def trial_name(report: ProbeReport, trial: Trial) -> str:
    """Returns the format of a trial, and what the advice changed in it."""
    if trial.rules:
        return f"{trial.format} with {plural(len(trial.rules), 'rule')}"
    is_added = any(trial is other for other in report.retrained)
    return f"{trial.format}, constant scale" if is_added else trial.format


def outcome(report: ProbeReport, trial: Trial) -> str:
    """Returns how a trial ended, in a few words."""
    if trial.failure is not None:
        return f"fails: {trial.failure}"
    if not report.is_off(trial):
        return "within noise"
    return "skips too much" if trial.gap < report.limit else "worse than noise"


def trial_notes(report: ProbeReport) -> list[str]:
    """Returns what one unit of noise is, what cannot be detected, and what the table leaves empty."""
    noise = report.noise
    num_seeds = len(report.noise_runs) - 1
    notes = [
        "The loss is the mean over the last quarter of the steps, on the same samples in every trial.",
        f"One unit of noise is {report.unit:.2g} in the loss: FP32 with {num_seeds} other seeds varies by "
        f"{noise.seed:.2g}, with weights an ulp away by {noise.rounding:.2g} (standard deviations).",
        f"Detection limit: a gap below {report.limit:.2g} (2 units) cannot be told from noise.",
    ]
    emulated = [trial.format for trial in report.trials if trial.ms_per_step is None and trial.losses]
    if emulated:
        notes.append(f"No time for {', '.join(emulated)}: emulated on {report.device}, where it would say nothing.")
    if report.retrained:
        notes.append(
            "The last rows are trials that the advice added. They ran alone, so their times compare less well."
        )
    if any(trial.format == "fp8" for trial in report.trials) and not report.analysis.worst("fp8"):
        notes.append("In the fp8 trial no product was FP8: every Linear stays in BF16, as it would in training.")
    notes += [f"{name} was left out: {reason}." for name, reason in report.left_out.items()]
    return notes


def product_table(report: ProbeReport, num: int) -> Table:
    """Returns the ``num`` products of each format with the largest predicted change of the loss."""
    columns = ("format", "module", "product", "SQNR", "to zero", "overflow", "cause", "predicted change of the loss")
    rows = [
        (
            result.format,
            module_name(result.module),
            result.product,
            f"{result.sqnr_db:.1f} dB",
            f"{max(result.underflow, 0.0):.2%}",
            f"{result.saturation:.2%}",
            result.cause or "-",
            f"{result.predicted:.1e}",
        )
        for trial in report.trials
        for result in report.analysis.worst(trial.format)[:num]
    ]
    return Table(f"Modules: the {num} worst products of each format", columns, rows)


def flip_table(report: ProbeReport, num: int | None = None) -> Table:
    """Returns the modules that were run alone in a format; ``num``: only the worst of each format."""
    rows = [
        (flip.format, module_name(flip.module), f"{flip.predicted:.1e}", f"{flip.measured:.1e}")
        for flips in _by_format(report).values()
        for flip in flips[:num]
    ]
    title = "Check: one module alone in a format, forward only"
    return Table(title, ("format", "module", "predicted change of the loss", "measured"), rows)


def _by_format(report: ProbeReport) -> dict[str, list[Flip]]:
    names = dict.fromkeys(flip.format for flip in report.flips)
    return {name: [flip for flip in report.flips if flip.format == name] for name in names}


def flip_notes(report: ProbeReport) -> list[str]:
    """Returns how well the predictions rank the modules that were run alone."""
    notes = []
    for name, flips in _by_format(report).items():
        correlation = rank_correlation([flip.predicted for flip in flips], [flip.measured for flip in flips])
        if correlation is not None:
            notes.append(
                f"{name}: rank correlation of predicted and measured change {correlation:.2f}, over the "
                f"{len(flips)} worst and best modules."
            )
    return notes


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Returns Spearman's rank correlation; None if it is undefined: fewer than three pairs, or all ranks equal."""
    if len(first) < 3:
        return None
    ours, theirs = _ranks(first), _ranks(second)
    mean = (len(first) - 1) / 2
    covariance = math.fsum((a - mean) * (b - mean) for a, b in zip(ours, theirs, strict=True))
    spread = math.fsum((a - mean) ** 2 for a in ours) * math.fsum((b - mean) ** 2 for b in theirs)
    return covariance / math.sqrt(spread) if spread else None


def _ranks(values: Sequence[float]) -> list[float]:
    """Returns the rank of each value from 0; equal ones share the mean of theirs."""
    return [
        math.fsum(other < value for other in values) + (math.fsum(other == value for other in values) - 1) / 2
        for value in values
    ]


def scale_notes(report: ProbeReport) -> list[str]:
    """Returns the constant loss scale of FP16 with its evidence, if FP16 was examined."""
    scale = ConstantScale.of(report.analysis)
    return [] if scale is None else [f"{scale}."]


def advice_notes(report: ProbeReport) -> list[str]:
    """Returns the reasons of the advice, those of its rules first."""
    rules = [f"rule '{rule.pattern}' ({rule.format}): {rule.reason}" for rule in report.advice.rules]
    return [*rules, *report.advice.reasons]


def time_note(report: ProbeReport) -> str:
    """Returns the time of each stage."""
    stages = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in report.seconds.items())
    return f"The probe took {sum(report.seconds.values()):.0f} s: {stages}."


def module_name(name: str) -> str:
    """Returns the name of a module for a reader; that of the model itself is empty."""
    return name or "(the model)"
