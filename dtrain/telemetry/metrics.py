"""Metrics of a run and their files: ``metrics.jsonl``, ``summary.json``, and ``failures/step-N.json`` per skipped step.

``metrics.jsonl`` has three kinds of lines. A training line has the fields of ``StepMetrics`` (``reason`` and
``culprit`` only for a skipped step; the phases only on a CPU; ``slowest_rank`` and ``busy_*_ms`` only with several
ranks; ``compiled_graphs`` only if blocks are compiled; ``float8_*`` only in a shadow step). A validation line is
``{"step": ..., "val_loss": ...}``, with metrics of the task, such as ``val_accuracy``, and all of them again with
``_ema`` if an average is kept. A sampled step has a line
``{"step": ..., "precision": {...}}`` too: see docs/precision/telemetry.md. JSON has no NaN or infinity, so
non-finite numbers are written as ``null``.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dtrain.errors import ConfigError
from dtrain.redaction.redact import redact_values

if TYPE_CHECKING:  # it imports torch, which the processes that only write files need not wait for
    from dtrain.telemetry.precision import PrecisionFindings

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
CONFIG_FILE = "config.yaml"
RESTARTS_FILE = "restarts.json"
CHECKPOINTS = "checkpoints"
FAILURES = "failures"
METRIC = re.compile(r"val_(?!loss)\w{1,40}", re.ASCII)
"""Names of the metrics of a validation, such as ``val_accuracy``."""
_BUSY = ("slowest_rank", "busy_slowest_ms", "busy_median_ms", "busy_spread_ms")
_PHASES = ("forward_ms", "backward_ms", "update_ms", "rank_wait_ms")
_GRAPHS = "compiled_graphs"
_GAP = ("float8_loss_gap", "float8_gradient_cosine", "float8_gradient_norm_ratio")
TIMES = ("tokens_per_s", "step_ms", "data_wait_ms", "peak_memory", *_PHASES, *_BUSY, _GRAPHS)
"""Fields of a training line that depend on the machine or the process; a run that is repeated has the same others."""
_OPTIONAL = ("format", "global_batch_size", "seq_len", "reason", "culprit", *_PHASES, *_BUSY, _GRAPHS, *_GAP)


@dataclass(frozen=True)
class StepMetrics:
    """One logged step.

    ``step`` counts attempted steps; ``tokens`` counts the targets of applied steps that count in the loss.
    ``format`` is the precision of the step, such as ``bf16``.
    ``global_batch_size`` and, of tokens, ``seq_len`` are those of this step's batch.
    ``tokens_per_s``, ``step_ms`` and ``data_wait_ms``, the time that rank 0 waited for its batch, are means over the
    steps since the last logged one, without evaluation and saving. ``peak_memory`` is the most bytes on rank 0 since
    the start of the run, or of its finish in another precision: of tensors on its GPU, else of the resident process.
    ``forward_ms``, ``backward_ms`` and ``update_ms`` are rank 0's times in these phases without its waits for other
    ranks, and ``rank_wait_ms`` these waits; on a GPU, ahead of which the host runs, they are None. ``evidence`` is the
    culprit as a dictionary.
    ``busy_*_ms`` are milliseconds a step without the waits for other ranks, in the last window in which the ranks
    compared them: of the slowest rank, of the median rank, and between the slowest and the fastest.
    ``compiled_graphs`` is the number of graphs into which rank 0 has compiled blocks since the start of the process;
    None: they are not compiled. ``float8_*`` compare FP8 with BF16 in a step of ``precision.float8.shadow_every``: see
    ``dtrain.engine.parts.shadow.Float8Gap``.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    loss_scale: float
    applied: bool
    skipped_steps: int
    tokens: int
    tokens_per_s: float
    step_ms: float
    data_wait_ms: float
    peak_memory: int
    format: str | None = None
    global_batch_size: int | None = None
    seq_len: int | None = None
    reason: str | None = None
    culprit: str | None = None
    evidence: dict[str, Any] | None = None
    forward_ms: float | None = None
    backward_ms: float | None = None
    update_ms: float | None = None
    rank_wait_ms: float | None = None
    slowest_rank: int | None = None
    busy_slowest_ms: float | None = None
    busy_median_ms: float | None = None
    busy_spread_ms: float | None = None
    compiled_graphs: int | None = None
    float8_loss_gap: float | None = None
    float8_gradient_cosine: float | None = None
    float8_gradient_norm_ratio: float | None = None

    def to_dict(self) -> dict[str, Any]:
        values = finite(asdict(self))
        del values["evidence"]
        return {key: value for key, value in values.items() if value is not None or key not in _OPTIONAL}


@dataclass(frozen=True)
class Summary:
    """Summary of a run, written to ``summary.json`` at its end.

    ``tokens_per_s`` and ``wall_s`` cover the time since the run was last started. The rate excludes the first step,
    which compiles, unless it is the only one. ``tokens`` and the rate count targets that count in the loss; ``mfu``
    counts all tokens that the model computes, and attention by its causal half; ``mfu_full`` counts all of attention.
    They are None if the device's peak rate is unknown. ``gpu`` is the state of rank 0's GPU at the end.
    ``val_metrics`` are those of the task in the last validation, such as ``val_accuracy``; without tokens, ``tokens``
    counts samples.
    """

    finished: bool
    steps: int
    applied_steps: int
    skipped_steps: int
    tokens: int
    train_loss: float | None
    val_loss: float | None
    val_loss_ema: float | None
    tokens_per_s: float | None
    mfu: float | None
    mfu_full: float | None
    gpu: dict[str, Any] | None
    wall_s: float
    memory: dict[str, int]
    memory_formula: dict[str, int]
    num_parameters: int
    world_size: int
    device: str
    engine: str
    precision: str
    contract: dict[str, Any]
    val_metrics: Mapping[str, float] = field(default_factory=dict)


class Sink(Protocol):
    def step(self, metrics: StepMetrics) -> None: ...

    def validation(self, step: int, losses: Mapping[str, float]) -> None:
        """Takes ``val_loss`` and metrics; if a moving average of the weights is kept, also those with ``_ema``."""

    def precision(self, findings: PrecisionFindings) -> None:
        """Takes what a sampled step lost to precision."""

    def close(self, exit_code: int) -> None:
        """Ends the run, also after a failure."""


class MetricsFile:
    """Appends lines to ``metrics.jsonl`` and flushes each.

    Lines after ``start_step``, which the run resumes from, are dropped first: the resumed run writes them again.
    """

    def __init__(self, run_dir: Path, start_step: int) -> None:
        path = run_dir / METRICS_FILE
        self._validated = -1  # the last step with a validation loss
        if path.exists():
            kept = [line for line in read_metrics(path) if line["step"] <= start_step]
            self._validated = max((line["step"] for line in kept if "val_loss" in line), default=-1)
            write_atomically(path, "".join(_to_line(line) for line in kept))
        self._file = path.open("a", encoding="utf-8")

    def step(self, metrics: StepMetrics) -> None:
        self._append(metrics.to_dict())

    def validation(self, step: int, losses: Mapping[str, float]) -> None:
        """Appends a validation line, but not twice for a step if a run that died at its end is restarted."""
        if step > self._validated:
            self._append(finite({"step": step, **losses}))
            self._validated = step

    def precision(self, findings: PrecisionFindings) -> None:
        self._append(finite({"step": findings.step, "precision": findings.summary()}))

    def close(self, exit_code: int) -> None:
        self._file.close()

    def _append(self, line: dict[str, Any]) -> None:
        self._file.write(_to_line(line))
        self._file.flush()


class FailureFiles:
    """Writes ``failures/step-N.json`` for every skipped step N (counted from 1, as in ``metrics.jsonl``).

    Args:
        run_dir: the run directory.
        world_size: number of ranks, which the culprit's rank is one of.
    """

    def __init__(self, run_dir: Path, world_size: int) -> None:
        self._folder = run_dir / FAILURES
        self._world_size = world_size

    def step(self, metrics: StepMetrics) -> None:
        if metrics.applied:
            return
        self._folder.mkdir(exist_ok=True)
        content = {**metrics.to_dict(), "world_size": self._world_size, "evidence": metrics.evidence}
        write_json(self._folder / failure_file(metrics.step), content, indent=2)

    def validation(self, step: int, losses: Mapping[str, float]) -> None: ...

    def precision(self, findings: PrecisionFindings) -> None: ...

    def close(self, exit_code: int) -> None: ...


def failure_file(step: int) -> str:
    """Returns the name of the file of a skipped step in ``failures/``."""
    return f"step-{step}.json"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a ``metrics.jsonl``, without an incomplete last line that a crash left.

    Raises:
        ConfigError: a line before the last one is not a JSON object with a ``step``.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            record["step"] += 0
        except (ValueError, TypeError, KeyError):
            if number == len(lines):
                break
            raise ConfigError(
                f"{path}, line {number}: expected a JSON object with a number 'step', got {line[:60]!r}; "
                "remove that line or choose another run_dir"
            ) from None
        records.append(record)
    return records


def write_summary(run_dir: Path, summary: Summary) -> None:
    write_json(run_dir / SUMMARY_FILE, asdict(summary), indent=2)


def read_summary(run_dir: Path) -> Summary | None:
    """Returns the ``summary.json`` of a run directory, or None if it is missing or invalid."""
    try:
        values = json.loads((run_dir / SUMMARY_FILE).read_text(encoding="utf-8"))
        values = {"val_metrics": {}, "mfu_full": None, "gpu": None, **values}  # older runs have none
        return Summary(**{item.name: values[item.name] for item in fields(Summary)})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def finite(value: Any) -> Any:
    """Replaces each non-finite number by None, also in dicts and sequences."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(item) for item in value]
    return value


def to_json(values: Any, *, indent: int | None = None) -> str:
    """Returns a record as JSON without secrets; numbers that are not finite become null."""
    return json.dumps(finite(redact_values(values)), indent=indent, allow_nan=False) + "\n"


def write_json(path: Path, values: Any, *, indent: int | None = None) -> None:
    """Writes ``to_json`` as ``write_atomically`` does."""
    write_atomically(path, to_json(values, indent=indent))


def write_atomically(path: Path, text: str) -> None:
    """Replaces the file at ``path``; after a crash the file is either the old one or the new one.

    Raises:
        OSError: naming the file, also if it came from a write, whose errors name none.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(path)
        raise
    temporary.replace(path)


def _to_line(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
