"""Reads a run directory for its report; anything may be missing, because the run may have been killed or be older."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import yaml

from dtrain.checkpoint.inspection import CheckpointStatus, verify
from dtrain.config.schema import unit_of
from dtrain.config.yaml_files import check_size
from dtrain.errors import CheckpointError, ConfigError
from dtrain.redaction.printable import printable
from dtrain.redaction.redact import redact_text, redact_values
from dtrain.telemetry.host import ENVIRONMENT_FILE
from dtrain.telemetry.metrics import CHECKPOINTS, CONFIG_FILE, FAILURES, METRIC, METRICS_FILE, SUMMARY_FILE

SERIES = (
    "loss", "val_loss", "val_loss_ema", "lr", "grad_norm", "loss_scale", "tokens_per_s", "peak_memory", "step_ms",
    "data_wait_ms", "forward_ms", "backward_ms", "update_ms", "rank_wait_ms", "busy_slowest_ms", "busy_median_ms",
    "busy_spread_ms",
)  # fmt: skip
"""Fields of ``metrics.jsonl`` that are kept, each as steps and values; beside them the metrics of validations."""

_MAX_SKIPS = 200  # listed
_MAX_METRICS = 8
_MAX_PICTURE = 4_000_000  # bytes
_PNG = b"\x89PNG\r\n\x1a\n"
_MAX_SAMPLE = 4000  # characters
_BATCH = 1000  # lines


FloatArray: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True)
class Series:
    """Values of one field by step."""

    steps: FloatArray
    values: FloatArray

    def __bool__(self) -> bool:
        return bool(len(self.steps))


@dataclass(frozen=True)
class Metrics:
    """The lines of ``metrics.jsonl``.

    Attributes:
        series: by field.
        skips: step, reason, loss scale and culprit of each skipped step, the first ones.
        num_skipped: of all.
        last: the last training line.
    """

    series: Mapping[str, Series]
    skips: list[dict[str, Any]]
    num_skipped: int
    last: Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """One run directory.

    Attributes:
        path: of the folder.
        deep: whether checkpoints are hashed whole.
    """

    path: Path
    deep: bool = False

    @staticmethod
    def open(path: Path, *, deep: bool = False) -> Run:
        """Returns the run; raises ``ConfigError`` if there is none at ``path``."""
        if not path.is_dir():
            raise ConfigError(f"{path}: no such folder; expected a run directory, such as runs/mine")
        if not (path / CONFIG_FILE).is_file() and not (path / METRICS_FILE).is_file():
            inner = sorted(item.name for item in path.iterdir() if (item / CONFIG_FILE).is_file())
            hint = f"; a sweep's runs lie inside: {path / inner[0]}, ..." if inner else ""
            raise ConfigError(f"{path} is no run directory: it has neither {CONFIG_FILE} nor {METRICS_FILE}{hint}")
        return Run(path, deep)

    @property
    def name(self) -> str:
        return redact_text(self.path.resolve().name)

    @cached_property
    def config(self) -> dict[str, Any]:
        """``config.yaml`` as flat ``{key: value}``."""
        try:
            text = (self.path / CONFIG_FILE).read_text(encoding="utf-8", errors="replace")
            check_size(text, self.path / CONFIG_FILE)
            return dict(flatten(redact_values(yaml.safe_load(text))))
        except (OSError, yaml.YAMLError, ConfigError):
            return {}

    def json(self, name: str) -> dict[str, Any]:
        """Returns a JSON object of the folder without secrets; empty if it is missing or damaged."""
        try:
            values = redact_values(json.loads((self.path / name).read_text(encoding="utf-8")))
        except (OSError, ValueError, RecursionError):
            return {}
        return values if isinstance(values, dict) else {}

    @cached_property
    def summary(self) -> dict[str, Any]:
        return self.json(SUMMARY_FILE)

    @cached_property
    def contract(self) -> dict[str, Any]:
        return self.json("precision.json")

    @cached_property
    def environment(self) -> dict[str, Any]:
        return self.json(ENVIRONMENT_FILE)

    @cached_property
    def memory(self) -> dict[str, Any]:
        return self.json("memory.json")

    @cached_property
    def metrics(self) -> Metrics:
        return _read_metrics(self.path / METRICS_FILE)

    @cached_property
    def precision(self) -> dict[str, Any]:
        """The newest sampled step."""
        files = sorted((self.path / "precision").glob("step-*.json"), key=lambda path: (len(path.name), path.name))
        return self.json(f"precision/{files[-1].name}") if files else {}

    @cached_property
    def checkpoints(self) -> list[CheckpointStatus]:
        try:
            return list(verify(self.path / CHECKPOINTS, fast=not self.deep).checkpoints)
        except (CheckpointError, OSError):
            return []

    @cached_property
    def hangs(self) -> list[str]:
        return sorted(path.name for path in (self.path / FAILURES).glob("hang-*"))

    @cached_property
    def sample(self) -> str:
        try:
            text = (self.path / "sample.txt").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return redact_text(printable(text))[:_MAX_SAMPLE]

    @cached_property
    def picture(self) -> bytes:
        """``sample.png``; empty if there is none."""
        try:
            with (self.path / "sample.png").open("rb") as file:
                data = file.read(_MAX_PICTURE + 1)
        except OSError:
            return b""
        return data if data.startswith(_PNG) and len(data) <= _MAX_PICTURE else b""

    @property
    def picture_note(self) -> str:
        """Why there is no ``picture`` although the folder has one; empty without a reason."""
        if self.picture or not (self.path / "sample.png").exists():
            return ""
        return f"sample.png is left out: it is no readable PNG of at most {_MAX_PICTURE / 1e6:.0f} MB"

    @property
    def unit(self) -> str:
        """Unit of the targets that count in the loss: ``tokens`` or ``samples``."""
        return unit_of(self.config.get("data.name"))

    @property
    def state(self) -> str:
        """``finished``, ``stopped`` (it resumes) or ``unfinished``: it runs, or was killed."""
        if not self.summary:
            return "unfinished"
        return "finished" if self.summary.get("finished") else "stopped"


def flatten(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted keys and values of nested mappings."""
    if isinstance(values, dict) and (values or not prefix):
        for key, value in values.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, values


class _Lines:
    """Lines with the same keys: their step and the fields that are kept, one line after the other."""

    def __init__(self, keys: Collection[str]) -> None:
        metrics = [name for name in keys if METRIC.fullmatch(name)] if "val_loss" in keys else []
        self.names = ["step", *(name for name in SERIES if name in keys), *metrics[:_MAX_METRICS]]
        self._values = array("d")
        self._get = itemgetter(*self.names) if self.names[1:] else lambda record: (record["step"],)

    def extend(self, records: Sequence[Mapping[str, Any]]) -> None:
        numel, rows = len(self._values), list(map(self._get, records))
        try:
            self._values.extend(chain.from_iterable(rows))
        except TypeError:  # null: a number that is not finite
            del self._values[numel:]
            values = chain.from_iterable(rows)
            self._values.extend(value if isinstance(value, (int, float)) else math.nan for value in values)

    def columns(self) -> dict[str, array[float]]:
        return {name: self._values[index :: len(self.names)] for index, name in enumerate(self.names)}


def _batches(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Yields the lines that are JSON objects with a step, some at a time; a crash may have cut one short."""
    with path.open(encoding="utf-8", errors="replace") as file:
        while lines := list(islice(file, _BATCH)):
            try:
                records = json.loads(f"[{','.join(lines)}]")  # in half the time of one call for each
            except (ValueError, RecursionError):
                records = []
                for line in lines:
                    with suppress(ValueError, RecursionError):
                        records.append(json.loads(line))
            yield [r for r in records if isinstance(r, dict) and type(r.get("step")) in (int, float)]


def _read_metrics(path: Path) -> Metrics:
    by_keys: dict[tuple[str, ...], _Lines] = {}
    skips: list[dict[str, Any]] = []
    num_skipped, last = 0, {}
    for batch in _batches(path) if path.is_file() else ():
        for keys, group in groupby(batch, key=tuple):  # by keys: most lines have those of the line before
            records = list(group)
            by_keys.setdefault(keys, _Lines(keys)).extend(records)
            if "applied" in keys:
                last = records[-1]
                skipped = [record for record in records if not record["applied"]]
                num_skipped += len(skipped)
                for record in skipped[: _MAX_SKIPS - len(skips)]:
                    skips.append({key: record.get(key) for key in ("step", "reason", "loss_scale", "culprit")})
    return Metrics(_series(by_keys.values()), redact_values(skips), num_skipped, redact_values(last))


def _series(lines: Collection[_Lines]) -> dict[str, Series]:
    """Returns each field by ascending step, without values that are not finite."""
    found: dict[str, list[tuple[array[float], array[float]]]] = {name: [] for name in SERIES}
    for own in lines:
        steps, *_ = columns = list(own.columns().values())
        for name, values in zip(own.names[1:], columns[1:], strict=True):
            found.setdefault(name, []).append((steps, values))
    series = {}
    for name, parts in found.items():
        at = np.concatenate([np.asarray(steps) for steps, _ in parts] or [np.empty(0)])
        numbers = np.concatenate([np.asarray(values) for _, values in parts] or [np.empty(0)])
        kept = np.isfinite(numbers)
        order = np.argsort(at[kept], kind="stable")
        series[name] = Series(at[kept][order], numbers[kept][order])
    return series
