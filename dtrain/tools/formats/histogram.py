"""``dtrain formats histogram``: the gradients of a run's sampled steps against the ranges of the formats."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

from dtrain.errors import ConfigError, nearest
from dtrain.precision.report import ParameterPrecision, PrecisionReport
from dtrain.telemetry.precision_files import FOLDER, read_sample, sample_files
from dtrain.tools.tables import Column, Table

_NUM_ROWS = 10


def read_run(run_dir: Path) -> list[PrecisionReport]:
    """Returns the sampled steps of a run, the first one first.

    Raises:
        ConfigError: it has none.
    """
    files = sample_files(run_dir)
    if not files:
        raise ConfigError(
            f"{run_dir} has no sampled step ({FOLDER}/step-N.json); name the directory of a run of at least "
            f"telemetry.precision_every steps"
        )
    return [read_sample(path).report for path in files.values()]


def chosen_names(report: PrecisionReport, pattern: str) -> list[str]:
    """Returns the names of the parameters that match ``pattern`` (``fnmatch``).

    Raises:
        ConfigError: none does.
    """
    names = [own.name for own in report.parameters]
    chosen = [name for name in names if fnmatchcase(name, pattern)]
    if not chosen:
        raise ConfigError(f"'{pattern}' matches no parameter of the run{nearest(pattern, names)}")
    return chosen


def worst_table(report: PrecisionReport, pattern: str) -> Table:
    """Returns the parameters that lose most in FP16 at the loss scale of the step."""
    names = set(chosen_names(report, pattern))
    worst = [own for own in report.worst(len(report.parameters)) if own.name in names][:_NUM_ROWS]
    better = "no" if report.better_scale is None else f"{report.better_scale:g}"
    columns: list[Column[ParameterPrecision]] = [
        ("parameter", lambda own: f"`{own.name}`"),
        ("computed in", lambda own: own.format),
        ("zeros", lambda own: _percent(own.shares.zeros)),
        ("FP16 flushes", lambda own: _percent(own.shares.flushed_fp16)),
        (f"scale {better} recovers", lambda own: _percent(own.shares.recovered_fp16)),
        ("E4M3 flushes", lambda own: _percent(own.shares.flushed_e4m3)),
        ("E5M2 flushes", lambda own: _percent(own.shares.flushed_e5m2)),
        ("update / weight", lambda own: _ratio(own)),
        ("lost without master: BF16", lambda own: "" if own.update is None else _percent(own.update.lost_bf16)),
        ("FP16", lambda own: "" if own.update is None else _percent(own.update.lost_fp16)),
    ]
    skipped = "" if report.applied else ", skipped"
    return Table.of(f"Step {report.step}, loss scale {report.loss_scale:g}{skipped}", columns, worst)


HISTOGRAM_NOTE = (
    "zeros: of all elements. FP16 flushes: of the nonzero elements of the gradient at the loss scale of the step; "
    "E4M3 and E5M2 at a scale of the tensor's own. Lost without master: changed elements whose update vanishes if the "
    "weight is stored in that format."
)


def _percent(share: float) -> str:
    if 0 < share < 0.0001:
        return "< 0.01 %"
    return f"{100 * share:.2f} %" if share else "0"


def _ratio(own: ParameterPrecision) -> str:
    return "" if own.update is None or own.update.ratio is None else f"{own.update.ratio:.1e}"
