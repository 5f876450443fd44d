"""The head that the results of all measurements share, and their JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from dtrain.config.dump import config_to_dict, from_plain
from dtrain.errors import ConfigError
from dtrain.redaction.redact import redact
from dtrain.telemetry.host import Host, describe_host
from dtrain.telemetry.metrics import write_json


@dataclass(frozen=True, kw_only=True)
class RecordHead:
    """The head of a result.

    Attributes:
        command: the command line, without secrets.
        date: local time, ISO 8601.
        host: machine and versions.
        config: the resolved configuration, without secrets.
    """

    command: str
    date: str
    host: Host
    config: dict[str, Any]


Found = TypeVar("Found")


def head(command: str, config: Any) -> dict[str, Any]:
    """Returns the fields of ``RecordHead`` for a measurement of this process, by name."""
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "host": describe_host(),
        "config": redact(config_to_dict(config)),
    }


def write_record(path: Path, record: Any, **more: Any) -> None:
    """Writes ``record`` and ``more`` atomically as JSON; numbers that are not finite become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {**asdict(record), **more}, indent=1)


def read_record(path: Path, kind: type[Found] | Callable[[Any], type[Found]], verb: str) -> Found:
    """Reads what ``write_record`` wrote; keys that ``kind`` does not have are its ``more``.

    Args:
        path: the file.
        kind: class of the record, or a function that returns it for the file's values.
        verb: whose result it is, such as ``bench``, for the error.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        found = kind if isinstance(kind, type) else kind(values)
        return from_plain(found, {item.name: values[item.name] for item in fields(found) if item.name in values})
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path} is no results file of this version of dtrain {verb}: {reason}") from error
