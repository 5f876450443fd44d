"""What a benchmark measured, and its JSON."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from dtrain.errors import BenchError
from dtrain.telemetry.metrics import finite, write_atomically

Record = TypeVar("Record")


@dataclass(frozen=True)
class Contender:
    """Who is measured.

    Attributes:
        name: unique in one run.
        engine: ``native``, or a peer: ``plain``, ``ddp``.
        ranks: processes it trains with.
        precision: the name of dtrain's policy; a peer runs under autocast in ``bf16``, plainly in ``fp32``.
        zero_stage: of the native engine, else None.
    """

    name: str
    engine: str
    ranks: int
    precision: str
    zero_stage: int | None = None

    @property
    def is_floor(self) -> bool:
        """Whether each rank trains its own model: what several busy cores cost before a byte is exchanged."""
        return self.engine == "plain" and self.ranks > 1


@dataclass(frozen=True)
class Assignment:
    """What one rank is to be.

    Attributes:
        contender: of which it is a part.
        rank: its number there.
        store: a file where its ranks meet.
        config: the suite's resolved configuration as plain values.
    """

    contender: Contender
    rank: int
    store: str
    config: dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """Some consecutive steps of one contender, while all others waited.

    Attributes:
        step_ms: wall time of each step on its slowest rank.
        losses: mean over the ranks, of each step.
        load: the machine's 1-minute load average when the turn began.
    """

    step_ms: list[float]
    losses: list[float | None]
    load: float


@dataclass(frozen=True)
class Footprint:
    """What a contender holds; bytes are those of the rank that holds the most.

    Attributes:
        num_parameters: of the model.
        state: bytes of model states by kind, counted on the tensors.
        formula: the same by the ZeRO formula, or None where there is none.
        peak_rss: highest resident size of the process, start-up included.
        peak_device: highest memory allocated on the GPU; None on CPU.
        device: name of the device.
    """

    num_parameters: int
    state: dict[str, int]
    formula: dict[str, int] | None
    peak_rss: int
    peak_device: int | None
    device: str


@dataclass(frozen=True)
class Entry:
    """One contender's results.

    Attributes:
        first_step_s: from the start of its processes to the end of its first step.
        warmup: the steps before the first round.
        turns: one a round.
    """

    contender: Contender
    first_step_s: float
    warmup: Turn
    turns: list[Turn]
    footprint: Footprint


@dataclass(frozen=True)
class Host:
    """The machine and the software, without its name."""

    cpu: str
    cores: int
    memory_gib: float
    gpus: list[str]
    system: str
    python: str
    torch: str
    dtrain: str


@dataclass(frozen=True)
class Results:
    """One run of a suite.

    Attributes:
        suite: ``engine`` or ``precision``.
        command: what was typed.
        date: local, ISO 8601.
        config: the resolved configuration.
        tokens_per_rank: of one step on one rank.
        train_starts_s: from the command ``dtrain train`` to its first step, each start; empty where not measured.
    """

    suite: str
    command: str
    date: str
    host: Host
    config: dict[str, Any]
    tokens_per_rank: int
    entries: list[Entry]
    train_starts_s: list[float]


def write_results(path: Path, results: Results) -> None:
    """Writes ``results`` as JSON: whole or not at all; numbers that are not finite become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(finite(asdict(results)), indent=1, allow_nan=False) + "\n")


def read_results(path: Path) -> Results:
    """The results that :func:`write_results` wrote.

    Raises:
        BenchError: the file cannot be read or is none of these.
    """
    try:
        return from_plain(Results, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise BenchError(f"{path} is no results file of this version of `dtrain bench` ({reason})") from error


def from_plain(kind: type[Record], values: Mapping[str, Any]) -> Record:
    """The record of dataclass ``kind`` from what ``dataclasses.asdict`` and JSON made of it.

    Raises:
        KeyError: a field without default is missing.
        TypeError: there is a field too many.
    """
    hints = get_type_hints(kind)
    known = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise TypeError(f"unexpected field '{name}'")
    required = [name for name, item in known.items() if item.default is MISSING and item.default_factory is MISSING]
    return kind(**{name: _convert(hints[name], values[name]) for name in [*required, *values]})


def _convert(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    if is_dataclass(hint):
        return from_plain(hint, value)  # type: ignore[arg-type]
    if get_origin(hint) is list:
        return [_convert(get_args(hint)[0], item) for item in value]
    if get_origin(hint) is tuple:
        return tuple(value)
    return value
