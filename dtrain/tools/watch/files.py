"""Reads the files of a run that may be written, replaced and removed meanwhile."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from dtrain.checkpoint.directory import committed_checkpoints
from dtrain.config.schema import unit_of
from dtrain.config.yaml_files import read_yaml
from dtrain.errors import ConfigError
from dtrain.telemetry.metrics import CHECKPOINTS, CONFIG_FILE, METRICS_FILE, SUMMARY_FILE

_KNOWN = 64
"""Bytes before the place up to which a file is read, by which a file that was written again is recognized."""


def is_run(path: Path) -> bool:
    """Whether a folder holds what ``dtrain train`` writes, from its first second on."""
    if any(os.path.isfile(path / name) for name in (CONFIG_FILE, METRICS_FILE, SUMMARY_FILE)):
        return True
    try:
        return bool(committed_checkpoints(path / CHECKPOINTS)) or any((path / CHECKPOINTS).glob("lease-*.json"))
    except OSError:
        return False


def read_object(path: Path) -> dict[str, Any]:
    """Returns a JSON object; {} if there is none that can be read."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_total_steps(path: Path) -> int | None:
    """Returns ``train.steps`` of the configuration at ``path``, or None if it cannot be read."""
    steps = _read_key(path, "train", "steps")
    return steps if type(steps) is int and 0 < steps < 1 << 53 else None


def read_unit(path: Path) -> str:
    """Returns what counts in the loss under the configuration at ``path``: ``tokens`` also if it cannot be read."""
    return unit_of(_read_key(path, "data", "name"))


def _read_key(path: Path, group: str, key: str) -> Any:
    try:
        return read_yaml(path)[group][key]
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError, ConfigError):
        return None


class LineReader:
    """Reads the new lines of a file of JSON objects; keeps no file open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._end = 0  # of the last whole line
        self._known = b""

    def restarted(self) -> bool:
        """Whether the file is another one than that which was read, so that all of it is new."""
        try:
            with self._path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                file.seek(max(0, self._end - _KNOWN))
                same = inode == self._inode and file.read(len(self._known)) == self._known
        except OSError:
            return False
        if same:
            return False
        self._inode, self._end, self._known = inode, 0, b""
        return True

    def new_lines(self) -> Iterator[dict[str, Any]]:
        """Yields the whole lines since the last call, without those that are no JSON object."""
        try:
            file = self._path.open("rb")
        except OSError:
            return
        with file:
            file.seek(self._end)
            for line in file:
                if not line.endswith(b"\n"):  # being written, or left by a crash
                    return
                self._end += len(line)
                self._known = (self._known + line)[-_KNOWN:]
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(record, dict):
                    yield record
