"""What a benchmark measured, and its JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from dtrain.config.dump import from_plain
from dtrain.errors import BenchError
from dtrain.telemetry.metrics import finite, write_atomically
from dtrain.tools.host import Host


@dataclass(frozen=True)
class Contender:
    """Who is measured.

    Attributes:
        name: unique in one run.
        engine: with a ``zero_stage`` the name of dtrain's engine; else ``plain`` or a key of ``bench.peers.PEERS``.
        ranks: processes it trains with.
        precision: the name of dtrain's policy; a peer is told ``bf16`` or ``fp32`` and does it in its own way.
        zero_stage: of dtrain's engine, else None.
        loss_scale: of dtrain's engine: a mode of dtrain's loss scale.
        times_vote: whether the native engine's vote is timed inside each step.
        pair: the name of the peer's contender that does the same work, next to which this one has its turns.
        recipe: of the FP8 products, where the precision is ``fp8``.
    """

    name: str
    engine: str
    ranks: int
    precision: str
    zero_stage: int | None = None
    loss_scale: str = "auto"
    times_vote: bool = False
    pair: str | None = None
    recipe: str | None = None

    @property
    def is_dtrain(self) -> bool:
        """Whether one of dtrain's engines trains it, and not a script of ``bench.peers``."""
        return self.zero_stage is not None

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
        cpu_ms: processor time of each step, user and system, summed over the ranks and their threads.
        parts_ms: wall time of timed parts of each step, by the part's name; a list for each rank.
    """

    step_ms: list[float]
    losses: list[float | None]
    load: float
    cpu_ms: list[float] = field(default_factory=list)
    parts_ms: dict[str, list[list[float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class LinearFormat:
    """In which format the engine computes a Linear, and why.

    Attributes:
        out_features: rows of its weight.
        in_features: columns of its weight.
    """

    name: str
    out_features: int
    in_features: int
    format: str
    reason: str


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
        linears: of the model, where dtrain's engine trains it in FP8.
    """

    num_parameters: int
    state: dict[str, int]
    formula: dict[str, int] | None
    peak_rss: int
    peak_device: int | None
    device: str
    linears: list[LinearFormat] = field(default_factory=list)


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
class Absence:
    """A contender that was to run and did not, or not to the end."""

    contender: Contender
    reason: str


@dataclass(frozen=True)
class Results:
    """One run of a suite.

    Attributes:
        suite: its name on the command line.
        command: what was typed.
        date: local, ISO 8601.
        config: the resolved configuration.
        tokens_per_rank: of one step on one rank.
        entries: of the contenders that ran to the end.
        train_starts_s: from the command ``dtrain train`` to its first step, each start; empty where not measured.
        absences: of the others.
    """

    suite: str
    command: str
    date: str
    host: Host
    config: dict[str, Any]
    tokens_per_rank: int
    entries: list[Entry]
    train_starts_s: list[float]
    absences: list[Absence] = field(default_factory=list)


@dataclass(frozen=True)
class Timing:
    """The times of one contender that is an operation, not a training.

    Attributes:
        contender: its name, unique in its case.
        nbytes: what it must move.
        ms: wall time, one a round.
        case: what it was timed on; contenders of one case are compared.
    """

    contender: str
    nbytes: int
    ms: list[float]
    case: str = ""

    def gb_per_s(self) -> list[float]:
        """``nbytes`` over the time, one a round."""
        return [self.nbytes / value / 1e6 for value in self.ms]


@dataclass(frozen=True)
class Timings:
    """One run of a suite of operations.

    Attributes:
        suite: its name on the command line.
        command: what was typed.
        date: local, ISO 8601.
        config: the resolved configuration.
        load: the machine's 1-minute load average before the first round.
        about: what was measured, and what its bytes count.
        bandwidth: the contender whose GB/s the others' are shares of; None where there is none.
        rivals: the contenders whose time the others' are compared with.
        timings: of all contenders.
    """

    suite: str
    command: str
    date: str
    host: Host
    config: dict[str, Any]
    load: float
    about: str
    bandwidth: str | None
    rivals: list[str]
    timings: list[Timing]


@dataclass(frozen=True)
class ProductTimes:
    """The wall times of one product, or of all three of a Linear with the casts of their operands.

    Attributes:
        product: ``output``, ``input gradient``, ``weight gradient``; or ``all three, with casts``.
        rows: tokens.
        out_features: rows of the weight.
        in_features: columns of the weight.
        ms: by contender, one a round.
    """

    product: str
    rows: int
    out_features: int
    in_features: int
    ms: dict[str, list[float]]


@dataclass(frozen=True)
class Width:
    """One model of the FP8 suite.

    Attributes:
        hidden_dim: of the model.
        entries: of the contenders that ran to the end; the first is BF16.
        products: of the distinct shapes among the Linears of its blocks.
        absences: of the other contenders.
    """

    hidden_dim: int
    entries: list[Entry]
    products: list[ProductTimes]
    absences: list[Absence] = field(default_factory=list)


@dataclass(frozen=True)
class Float8Results:
    """One run of the FP8 suite.

    Attributes:
        suite: its name on the command line.
        command: what was typed.
        date: local, ISO 8601.
        config: the resolved configuration.
        tokens_per_rank: of one step on one rank.
        emulated: whether FP8 was computed in FP32, so that its times say nothing about Tensor Cores.
        widths: in the order of their races.
    """

    suite: str
    command: str
    date: str
    host: Host
    config: dict[str, Any]
    tokens_per_rank: int
    emulated: bool
    widths: list[Width]

    @property
    def absences(self) -> list[Absence]:
        """Of all races."""
        return [absence for width in self.widths for absence in width.absences]


AnyResults: TypeAlias = Results | Timings | Float8Results


def write_results(path: Path, results: AnyResults) -> None:
    """Writes ``results`` as JSON: whole or not at all; numbers that are not finite become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(finite(asdict(results)), indent=1, allow_nan=False) + "\n")


def read_results(path: Path) -> AnyResults:
    """The results that :func:`write_results` wrote.

    Raises:
        BenchError: the file cannot be read or is none of these.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if "timings" in values:
            return from_plain(Timings, values)
        return from_plain(Float8Results, values) if "widths" in values else from_plain(Results, values)
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise BenchError(f"{path} is no results file of this version of `dtrain bench` ({reason})") from error
