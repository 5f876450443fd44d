"""Records of a benchmark's cases and measurements, and their JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from dtrain.config.blocks import Blocks
from dtrain.measure.record import RecordHead, read_record
from dtrain.telemetry.gpu import GPUState
from dtrain.tools.tables import Table


@dataclass(frozen=True)
class BenchmarkCase:
    """One training setup that is measured; ``name`` is unique among those of one ``width``.

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
        graph: whether it replays steps from CUDA graphs.
        offload: ``cpu``: the native engine's masters, optimizer states and main grads lie on the host.
        loss_chunk: instead of that of the suite's ``model``.
        width: its model's, if the suite has several.
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
    graph: bool = False
    offload: str = "none"
    loss_chunk: str | None = None
    width: int | None = None

    @property
    def is_dtrain(self) -> bool:
        return self.zero_stage is not None

    @property
    def is_lower_bound(self) -> bool:
        """Whether each rank trains its own model, which gives the time of busy cores without communication."""
        return self.engine == "plain" and self.ranks > 1


@dataclass(frozen=True)
class RankJob:
    """Holds the job of the ranks of a case.

    Attributes:
        config: the suite's.
        folder: which the ranks share, until they end.
        micro_batch: sequences in a step of one rank.
    """

    case: BenchmarkCase
    config: dict[str, Any]
    folder: str
    micro_batch: int


@dataclass(frozen=True)
class TimedSteps:
    """Consecutive steps of one case, timed while all other cases waited.

    Attributes:
        step_ms: wall time of each step on its slowest rank; with ``bench.window_steps`` of a step of each window.
        losses: of each step, mean over the ranks.
        load: the machine's 1-minute load average before the first step.
        cpu_ms: processor time of each step, user and system, summed over the ranks and their threads.
        parts_ms: wall time of parts of each step, by the part's name; one list for each rank.
        gpu: power limit and clocks of the first rank's GPU meanwhile, if windows of several steps were timed.
    """

    step_ms: list[float]
    losses: list[float | None]
    load: float
    cpu_ms: list[float] = field(default_factory=list)
    parts_ms: dict[str, list[list[float]]] = field(default_factory=dict)
    gpu: GPUState | None = None


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
        peak_device: highest memory allocated on the GPU since the first round began; None on CPU.
        peak_reserved: the same with the allocator's free blocks.
        available: memory of the GPU that the process can have.
        linears: formats of the model's Linears, if dtrain's engine trains it in FP8.
        host_kinds: kinds of ``state`` that lie in the memory of the host beside a GPU.
        activations: bytes held from a forward to its backward, if they were measured.
        graphs: into which the blocks were compiled; None: they were not.
        graph_breaks: of the compiled blocks.
        flops_causal: model FLOPs of a trained token, attention counted by its causal half; None if they are not known.
        flops_full: the same with all of attention, as PaLM counts it.
        fitted: micro-batches beyond the case's that were tried at the end, and fit.
        unfit: the one that did not; None: more was not tried.
        emulates_float8: whether FP8 products are computed in FP32, so that their time means nothing.
        warnings: of dtrain, such as the reason of a graph break.
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
    graph_breaks: int = 0
    peak_reserved: int | None = None
    available: int | None = None
    flops_causal: float | None = None
    flops_full: float | None = None
    fitted: list[int] = field(default_factory=list)
    unfit: int | None = None
    emulates_float8: bool = False
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CaseResult:
    """Measurements of one case.

    Attributes:
        first_step_s: from the start of its processes to the end of the first step.
        micro_batch: sequences in a step of one rank; fewer than the suite's if those were out of memory; None: the
            suite's.
        setup_s: part of ``first_step_s`` in which model and engine were built, on the slowest rank.
    """

    case: BenchmarkCase
    first_step_s: float
    warmup: TimedSteps
    rounds: list[TimedSteps]
    footprint: Footprint
    micro_batch: int | None = None
    setup_s: float | None = None


@dataclass(frozen=True)
class FailedCase:
    """A case that could not start, or did not run to the end; what it measured before is kept."""

    case: BenchmarkCase
    reason: str


@dataclass(frozen=True)
class ProductTimes:
    """Wall times of one product, or of all three of a Linear with the casts of their operands.

    Attributes:
        width: of the model.
        product: ``output``, ``input gradient``, ``weight gradient``; or ``all three, with casts``.
        sizes: M, N and K of the first one.
        count: of the products.
        ms: by case, one for each round.
    """

    width: int
    product: str
    sizes: list[int]
    count: int
    ms: dict[str, list[float]]


@dataclass(frozen=True)
class SuiteRun(RecordHead):
    """One run of a suite."""

    suite: str


@dataclass(frozen=True)
class TrainingResults(SuiteRun):
    """One run of a suite that trains.

    Attributes:
        tokens_per_rank: of one step on one rank.
        cases: those that started; the last ones may have fewer rounds if the command was ended.
        train_starts_s: from the command ``dtrain train`` to its first step, for each start; empty if not measured.
        failures: cases that failed.
        products: in FP8 against BF16, of the distinct shapes among the Linears of the blocks of each width.
    """

    tokens_per_rank: int
    cases: list[CaseResult]
    train_starts_s: list[float]
    failures: list[FailedCase] = field(default_factory=list)
    products: list[ProductTimes] = field(default_factory=list)


@dataclass(frozen=True)
class OperationTiming:
    """Times of one case of an operation, one for each round.

    Attributes:
        nbytes: bytes that it must move; 0 if its products take longer.
        workload: the operation and its size; cases of one workload are compared.
        flops: floating-point operations of its products; 0 if it is bound by memory.
        tokens: tokens that it writes or reads, or targets that it learns from.
        shares: other figures, by the title of their column.
    """

    case: str
    nbytes: int
    ms: list[float]
    workload: str = ""
    flops: int = 0
    tokens: int = 0
    shares: dict[str, float] = field(default_factory=dict)

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
class TableResults(SuiteRun):
    """One run of a suite whose cases have figures of their own; it is written again after each case.

    Attributes:
        description: the workload, and what the columns mean.
        tables: the first is the one that documents show.
        conclusions: one line each: what works, how fast, what to set.
        rows: the figures of each case, as plain values.
        failures: what does not hold on this machine; the exit code is then 1.
        left_out: cases that did not run, by name, with the reason.
    """

    description: str
    tables: list[Table]
    conclusions: list[str]
    rows: list[dict[str, Any]]
    failures: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """Returns all but the tables, for the end of a report."""
        failures = [f"Failed: {line}" for line in self.failures]
        return [*self.conclusions, *failures, *(f"Left out: {name}: {why}" for name, why in self.left_out.items())]


AnyResults: TypeAlias = TrainingResults | OperationResults | TableResults


def read_results(path: Path) -> AnyResults:
    """Reads the results of a suite; raises as ``read_record``."""
    return read_record(path, _kind, "bench")


def _kind(values: dict[str, Any]) -> type[AnyResults]:
    """Returns the class whose results alone have a certain field."""
    return TableResults if "tables" in values else OperationResults if "timings" in values else TrainingResults
