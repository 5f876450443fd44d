"""The record of an experiment, and its JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from matplotlib.figure import Figure

from dtrain.config.dump import from_plain
from dtrain.errors import ConfigError
from dtrain.telemetry.host import Host
from dtrain.telemetry.metrics import to_json, write_atomically
from dtrain.tools.tables import Table

Result = TypeVar("Result")
_LIST_OF_NUMBERS = re.compile(r'\[[^][{}"]*\]')


@dataclass(frozen=True)
class Experiment(Generic[Result]):
    """An experiment: its result is a dataclass that is plain JSON.

    Attributes:
        paper: one line: the paper's figure.
        finding: returns one sentence, the title of the picture.
    """

    result: type[Result]
    paper: str
    run: Callable[[], Result]
    finding: Callable[[Result], str]
    tables: Callable[[Result], Sequence[Table]]
    draw: Callable[[Result], Figure]


@dataclass(frozen=True)
class ExperimentRecord:
    """One run of an experiment; ``date`` is local in ISO 8601."""

    experiment: str
    command: str
    date: str
    host: Host
    threads: int
    wall_s: float
    result: dict[str, Any]


def write_record(path: Path, record: ExperimentRecord) -> None:
    text = to_json(asdict(record), indent=1)
    text = _LIST_OF_NUMBERS.sub(lambda found: " ".join(found.group().split()), text)  # on one line
    write_atomically(path, text)


def read_record(path: Path) -> ExperimentRecord:
    """Reads what :func:`write_record` has written.

    Raises:
        ConfigError: it is no such file.
    """
    try:
        return from_plain(ExperimentRecord, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is not a result of dtrain experiment: {error}") from None
