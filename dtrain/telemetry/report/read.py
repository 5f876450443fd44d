"""Reads a run directory for its report; anything may be missing, because the run may have been killed or be older."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dtrain.checkpoint.inspection import CheckpointStatus, verify
from dtrain.config.yaml_files import check_size
from dtrain.errors import CheckpointError, ConfigError
from dtrain.redaction.redact import redact_text, redact_values
from dtrain.telemetry.host import ENVIRONMENT_FILE
from dtrain.telemetry.metrics import CHECKPOINTS, CONFIG_FILE, FAILURES, METRICS_FILE, SUMMARY_FILE
from dtrain.telemetry.texts import printable

SERIES = (
    "loss", "val_loss", "val_loss_ema", "lr", "grad_norm", "loss_scale", "tokens_per_s", "peak_memory", "step_ms",
    "data_wait_ms", "forward_ms", "backward_ms", "update_ms", "rank_wait_ms", "busy_slowest_ms", "busy_median_ms",
    "busy_spread_ms",
)  # fmt: skip
"""Fields of ``metrics.jsonl`` that are kept, each as steps and values."""

_MAX_SKIPS = 200  # listed
_MAX_SAMPLE = 4000  # characters


@dataclass(frozen=True)
class Series:
    """Values of one field by step."""

    steps: Sequence[float] = ()
    values: Sequence[float] = ()

    def __bool__(self) -> bool:
        return bool(self.steps)


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
    """Lines with the same keys: their steps, and the values of the fields that are kept, one line after the other."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.names = [name for name in SERIES if name in keys]
        self.steps = array("d")
        self._values = array("d")
        self._get = itemgetter(*self.names, "step")  # several, so that it returns a tuple

    def add(self, record: Mapping[str, Any]) -> None:
        self.steps.append(record["step"])
        numel, row = len(self._values), self._get(record)[:-1]
        try:
            self._values.extend(row)
        except TypeError:  # null: a number that is not finite
            del self._values[numel:]
            self._values.extend(value if isinstance(value, (int, float)) else math.nan for value in row)

    def columns(self) -> Iterator[tuple[str, array[float]]]:
        for index, name in enumerate(self.names):
            yield name, self._values[index :: len(self.names)]


def _read_metrics(path: Path) -> Metrics:
    by_keys: dict[tuple[str, ...], _Lines] = {}
    skips: list[dict[str, Any]] = []
    num_skipped, last = 0, {}
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    record = json.loads(line)
                    keys = tuple(record)
                    if keys not in by_keys:
                        by_keys[keys] = _Lines(keys)
                    by_keys[keys].add(record)
                except (ValueError, TypeError, KeyError, RecursionError):  # torn by a crash
                    continue
                if "applied" in record:
                    last = record
                    if not record["applied"]:
                        num_skipped += 1
                        if len(skips) < _MAX_SKIPS:
                            skips.append({key: record.get(key) for key in ("step", "reason", "loss_scale", "culprit")})
    return Metrics(_series(by_keys.values()), redact_values(skips), num_skipped, redact_values(last))


def _series(lines: Collection[_Lines]) -> dict[str, Series]:
    """Returns each field by ascending step, without values that are not finite."""
    found: dict[str, list[tuple[array[float], array[float]]]] = {name: [] for name in SERIES}
    for own in lines:
        for name, values in own.columns():
            found[name].append((own.steps, values))
    series = {}
    for name, parts in found.items():
        at = np.concatenate([np.asarray(steps) for steps, _ in parts] or [np.empty(0)])
        numbers = np.concatenate([np.asarray(values) for _, values in parts] or [np.empty(0)])
        kept = np.isfinite(numbers)
        order = np.argsort(at[kept], kind="stable")
        series[name] = Series(at[kept][order].tolist(), numbers[kept][order].tolist())
    return series
