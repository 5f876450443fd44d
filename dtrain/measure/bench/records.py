"""Records of a benchmark's cases and measurements, and their JSON."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from dtrain.config.blocks import Blocks
from dtrain.config.dump import config_to_dict, from_plain
from dtrain.errors import BenchError
from dtrain.redaction.redact import redact
from dtrain.telemetry.host import Host, describe_host
from dtrain.telemetry.metrics import write_json


@dataclass(frozen=True)
class BenchmarkCase:
    """One training setup that is measured; ``name`` is unique in one run.

    Attributes:
        engine: with a ``zero_stage`` the name of dtrain's engine; else ``plain`` or a key of ``bench.peers.PEERS``.
        precision: name of dtrain's policy; a peer gets ``bf16`` or ``fp32`` and implements it in its own way.
        zero_stage: None unless one of dtrain's engines trains.
        times_vote: whether the native engine's vote is timed inside each step.
        samples: whether precision is measured in each step, and written.
        baseline: name of the peer's case that does the same work and is measured just before this one.
        recipe: of the FP8 products, if the precision is ``fp8``.
        blocks: recomputation and compilation in dtrain's engine, whose activations are then measured; None: as the
            suite's ``model`` says.
        reproducible: whether dtrain's engine gives the same bits at any world size.
        offload: ``cpu``: the native engine's masters, optimizer states and main grads lie on the host.
    """

    name: str
    engine: str
    ranks: int
    precision: str
    zero_stage: int | None = None
    loss_scale: str = "auto"
    times_vote: bool = False
    samples: bool = False
    baseline: str | None = None
    recipe: str | None = None
    blocks: Blocks | None = None
    reproducible: bool = False
    offload: str = "none"

    @property
    def is_dtrain(self) -> bool:
        return self.zero_stage is not None

    @property
    def is_lower_bound(self) -> bool:
        """Whether each rank trains its own model, which gives the time of busy cores without communication."""
        return self.engine == "plain" and self.ranks > 1


@dataclass(frozen=True)
class RankJob:
    """The job of one rank of a case: ``config`` is the suite's, ``store`` the file through which the ranks meet."""

    case: BenchmarkCase
    rank: int
    store: str
    config: dict[str, Any]


@dataclass(frozen=True)
class TimedSteps:
    """Consecutive steps of one case, timed while all other cases waited.

    Attributes:
        step_ms: wall time of each step on its slowest rank.
        losses: mean over the ranks.
        load: the machine's 1-minute load average before the first step.
        cpu_ms: processor time of each step, user and system, summed over the ranks and their threads.
        parts_ms: wall time of parts of each step, by the part's name; one list for each rank.
    """

    step_ms: list[float]
    losses: list[float | None]
    load: float
    cpu_ms: list[float] = field(default_factory=list)
    parts_ms: dict[str, list[list[float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class LinearFormat:
    """The format in which the engine computes a Linear, and the reason; with the times that decided, if any did."""

    name: str
    out_features: int
    in_features: int
    format: str
    reason: str
    bf16_ms: float | None = None
    float8_ms: float | None = None


@dataclass(frozen=True)
class Footprint:
    """Memory of a case, in bytes of the rank that holds the most.

    Attributes:
        state: model states by kind, counted on the tensors.
        formula: the same by the ZeRO formula; None for peers.
        peak_rss: highest resident size of the process, start-up included.
        peak_device: highest memory allocated on the GPU; None on CPU.
        linears: formats of the model's Linears, if dtrain's engine trains it in FP8.
        host_kinds: kinds of ``state`` that lie in the memory of the host beside a GPU.
        activations: bytes held from a forward to its backward, if they were measured.
        graphs: into which dtrain compiled the blocks; None: it did not.
    """

    num_parameters: int
    state: dict[str, int]
    formula: dict[str, int] | None
    peak_rss: int
    peak_device: int | None
    device: str
    linears: list[LinearFormat] = field(default_factory=list)
    host_kinds: list[str] = field(default_factory=list)
    activations: int | None = None
    graphs: int | None = None


@dataclass(frozen=True)
class CaseResult:
    """Measurements of one case; ``first_step_s`` counts from the start of its processes."""

    case: BenchmarkCase
    first_step_s: float
    warmup: TimedSteps
    rounds: list[TimedSteps]
    footprint: Footprint


@dataclass(frozen=True)
class FailedCase:
    """A case that could not start, or did not run to the end."""

    case: BenchmarkCase
    reason: str


@dataclass(frozen=True)
class SuiteRun:
    """One run of a suite; ``date`` is local in ISO 8601, ``config`` the resolved configuration."""

    suite: str
    command: str
    date: str
    host: Host
    config: dict[str, Any]


def run_header(suite: str, command: str, config: Any) -> dict[str, Any]:
    """Returns the fields of :class:`SuiteRun` for a run of this process."""
    date = time.strftime("%Y-%m-%dT%H:%M:%S")
    return {
        "suite": suite,
        "command": command,
        "date": date,
        "host": describe_host(),
        "config": redact(config_to_dict(config)),
    }


@dataclass(frozen=True)
class TrainingResults(SuiteRun):
    """One run of a suite that trains.

    Attributes:
        tokens_per_rank: of one step on one rank.
        cases: those that ran to the end.
        train_starts_s: from the command ``dtrain train`` to its first step, for each start; empty if not measured.
        failures: the other cases.
    """

    tokens_per_rank: int
    cases: list[CaseResult]
    train_starts_s: list[float]
    failures: list[FailedCase] = field(default_factory=list)


@dataclass(frozen=True)
class OperationTiming:
    """Times of one case of an operation, one for each round.

    Attributes:
        nbytes: bytes that it must move; 0 if its products take longer.
        workload: the operation and its size; cases of one workload are compared.
        flops: floating-point operations of its products; 0 if it is bound by memory.
        tokens: tokens that it writes or reads, or targets that it learns from.
    """

    case: str
    nbytes: int
    ms: list[float]
    workload: str = ""
    flops: int = 0
    tokens: int = 0

    def gb_per_s(self) -> list[float]:
        return [self.nbytes / value / 1e6 for value in self.ms]

    def tflop_per_s(self) -> list[float]:
        return [self.flops / value / 1e9 for value in self.ms]

    def tokens_per_s(self) -> list[float]:
        return [1000 * self.tokens / value for value in self.ms]


@dataclass(frozen=True)
class MatrixTraffic:
    """Bytes that all ranks together send in a step of an optimizer of whole matrices, at stages 1 to 3.

    Attributes:
        bytes_per_parameter: bytes for each matrix parameter, to the owners of the matrices and back.
        bound: what they are at most, on any number of ranks.
    """

    optimizer: str
    ranks: int
    bytes_per_parameter: float
    bound: float


@dataclass(frozen=True)
class OperationResults(SuiteRun):
    """One run of a suite of operations.

    Attributes:
        load: the machine's 1-minute load average before the first round.
        description: the workload, and what its bytes count.
        reference: the case whose GB/s the others' are divided by, or None.
        baselines: the cases whose time is divided by the others'.
        traffic: of the optimizers of whole matrices.
    """

    load: float
    description: str
    reference: str | None
    baselines: list[str]
    timings: list[OperationTiming]
    traffic: list[MatrixTraffic] = field(default_factory=list)


@dataclass(frozen=True)
class ProductTimes:
    """Wall times of one product, or of all three of a Linear with the casts of their operands.

    Attributes:
        product: ``output``, ``input gradient``, ``weight gradient``; or ``all three, with casts``.
        rows: number of tokens.
        ms: by case, one for each round.
    """

    product: str
    rows: int
    out_features: int
    in_features: int
    ms: dict[str, list[float]]


@dataclass(frozen=True)
class WidthResults:
    """One model of the FP8 suite.

    Attributes:
        cases: those that ran to the end; the first is BF16.
        products: of the distinct shapes among the Linears of its blocks.
    """

    hidden_dim: int
    cases: list[CaseResult]
    products: list[ProductTimes]
    failures: list[FailedCase] = field(default_factory=list)


@dataclass(frozen=True)
class Float8Results(SuiteRun):
    """One run of the FP8 suite.

    Attributes:
        emulated: whether FP8 was computed in FP32, so that its times say nothing about Tensor Cores.
    """

    tokens_per_rank: int
    emulated: bool
    widths: list[WidthResults]

    @property
    def failures(self) -> list[FailedCase]:
        return [failure for width in self.widths for failure in width.failures]


AnyResults: TypeAlias = TrainingResults | OperationResults | Float8Results


def write_results(path: Path, results: AnyResults) -> None:
    """Writes ``results`` as JSON, atomically; numbers that are not finite become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(results), indent=1)


def read_results(path: Path) -> AnyResults:
    """Reads what :func:`write_results` wrote.

    Raises:
        BenchError: the file cannot be read, or holds something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if "timings" in values:
            return from_plain(OperationResults, values)
        return from_plain(Float8Results, values) if "widths" in values else from_plain(TrainingResults, values)
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise BenchError(f"{path} is no results file of this version of `dtrain bench` ({reason})") from error
