"""What an experiment consists of, and the record of its run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from matplotlib.figure import Figure

from dtrain.measure.record import RecordHead
from dtrain.tools.tables import Table

Result = TypeVar("Result")


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


@dataclass(frozen=True, kw_only=True)
class ExperimentRecord(RecordHead):
    """One run of an experiment, which has no configuration."""

    experiment: str
    threads: int
    wall_s: float
    result: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
