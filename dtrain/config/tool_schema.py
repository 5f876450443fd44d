"""The typed schemas of ``dtrain bench``, ``parity`` and ``accept``; keys shared with training mean the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from dtrain.config.capabilities import SETTINGS
from dtrain.config.data import DataConfig, StdlibDataConfig
from dtrain.config.engines import DDP, FSDP2, DeepSpeed, Native
from dtrain.config.fields import CheckedRecord, at_least, between, group, one_of, setting
from dtrain.config.model import ModelConfig
from dtrain.config.optim import OptimConfig, Optimizer, OptimKeys
from dtrain.config.precision import Float8, PrecisionConfig
from dtrain.config.schedule import Cosine, ScheduleConfig
from dtrain.config.schema import LaunchConfig, RunConfig, TrainConfig
from dtrain.errors import ConfigError

_RANKS = "Ranks, as processes on this machine."
_THREADS = "PyTorch threads of a rank."
_DEVICE = "Device; auto: a GPU if there is one."
_ROUNDS = "Rounds; each round measures every benchmark case once."
_STEPS = "Steps of one case in one round."
_OUT = "Results file; null: `runs/bench-<suite>-<date>_<time>.json`."
_STAGE = "ZeRO stage of the native engine."

BLOCK_CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "compile": {"compile": "blocks"},
    "compile+selective": {"compile": "blocks", "recompute": "selective"},
    "compile+full": {"compile": "blocks", "recompute": "full"},
}
"""Keys of ``model`` by the name of a case of ``bench.cases``."""


STEP_CASES: dict[str, dict[str, Any]] = {
    "dtrain": {},
    "chunked": {"loss_chunk": "auto"},
    "reproducible": {"reproducible": True},
    "graph": {"graph": True},
    "fsdp2": {"engine": "fsdp2_no_reshard"},  # on one rank resharding only adds copies
    "deepspeed": {"engine": "deepspeed_2"},
    "plain": {"engine": "plain"},
    "tensorwise": {"precision": "fp8", "recipe": "tensorwise"},
    "rowwise": {"precision": "fp8", "recipe": "rowwise"},
    "rowwise_bf16_wgrad": {"precision": "fp8", "recipe": "rowwise_bf16_wgrad"},
    "blockwise": {"precision": "fp8", "recipe": "blockwise"},
    "eager": {"blocks": {}},
    "selective": {"blocks": {"recompute": "selective"}},
    "full": {"blocks": {"recompute": "full"}},
    "offload": {"blocks": {}, "offload": "cpu"},
}
"""What a case of ``bench.cases`` differs in from dtrain's native engine in BF16.

With ``blocks`` they are not compiled, and activations are measured; else blocks are compiled if ``model.compile`` says
so, a peer's too. So an acceptance of a machine is a few commands of this suite, each with its cases and its size.
"""


@dataclass(frozen=True)
class MeasurementConfig(CheckedRecord):
    """Keys of every suite that starts ranks."""

    ranks: int = at_least(1, 1, _RANKS)
    threads_per_rank: int = at_least(1, 1, _THREADS)
    device: str = one_of("auto", "cpu", "cuda", doc=_DEVICE)
    rounds: int = at_least(10, 1, _ROUNDS)
    out: str | None = setting(None, _OUT, is_path=True)


@dataclass(frozen=True)
class BenchConfig(MeasurementConfig):
    """Size and repetition of the measurements. Cases alternate in every round, so that noise affects all of them."""

    micro_batch_size: int = at_least(
        4, 1, "Sequences in a step of one rank; a case that is out of memory at its start takes half of them."
    )
    warmup_steps: int = at_least(2, 0, "Steps before the first round, which are not timed.")
    steps: int = at_least(3, 1, _STEPS)
    window_steps: int = at_least(
        1, 1, "Steps timed together, whose losses are read after them; 1: a step ends when the host has read its loss."
    )
    data: str = one_of(
        "loader",
        "device",
        "random",
        doc="loader: a step takes its batch from the loader, as in training; device: the same batches lie on the "
        "device before the step; random: so do batches of random tokens. With the last two the weights of a built-in "
        "model are drawn on the device, which takes less time.",
    )
    resident: bool = setting(
        True,
        "All cases are in memory from the first round to the last; false: each round of a case is a start of its own, "
        "for models that do not fit side by side.",
    )
    attempts: int = at_least(
        0, 0, "Larger micro-batches to try at the end of a case, each one sequence larger, up to one that does not fit."
    )


@dataclass(frozen=True)
class EngineBenchConfig(BenchConfig):
    """dtrain's engines against a plain PyTorch loop on one rank, and against other libraries on several.

    Compute-bound by default: 10.9M parameters, 1,024 tokens a rank and step. Communication-bound, 43.0M parameters and
    128 tokens: ``model.hidden_dim=768 model.num_heads=12 model.max_seq_len=128 bench.micro_batch_size=1``.
    """

    ranks: int = at_least(2, 1, _RANKS)
    stages: list[int] = setting([0, 1, 2, 3], "ZeRO stages of the native engine.")
    engines: list[str] | None = setting(
        None,
        "Other engines of dtrain, as fsdp2 or fsdp2:3 (stage), each beside the library that does the same work; null: "
        "all that are installed, []: none.",
    )
    peers: list[str] | None = setting(
        None, "Other libraries; null: all, []: none. A library that is not installed is left out."
    )
    precision: str = one_of("bf16", "fp32", doc="Precision of every case.")
    reproducible: bool = setting(
        False, "Measure each case of the native engine with engine.reproducible=true too, beside the one without."
    )
    graph: bool = setting(False, "The same with engine.graph=true, on GPUs.")
    starts: int = at_least(5, 0, "Starts of `dtrain train` whose first step is timed.")


@dataclass(frozen=True)
class PrecisionBenchConfig(BenchConfig):
    """Mixed precision against FP32, all else equal."""

    precisions: list[str] = setting([], "Precisions beside fp32; []: those that the device computes fast.")
    zero_stage: int = between(2, 0, 3, _STAGE)


@dataclass(frozen=True)
class VoteBenchConfig(BenchConfig):
    """Cost of the vote in real steps, and of a dynamic loss scale against none, all else equal."""

    ranks: int = at_least(2, 1, _RANKS)
    rounds: int = at_least(20, 1, _ROUNDS)
    steps: int = at_least(5, 1, _STEPS)
    zero_stage: int = between(2, 0, 3, _STAGE)


@dataclass(frozen=True)
class TelemetryBenchConfig(BenchConfig):
    """Cost of a sampled step, in which every gradient and update is measured, against the same step without."""

    micro_batch_size: int = at_least(8, 1, "Sequences in a step of one rank.")
    rounds: int = at_least(20, 1, _ROUNDS)
    precisions: list[str] = setting([], "Precisions to measure; []: bf16, or what the device computes fast.")
    zero_stage: int = between(2, 0, 3, _STAGE)


@dataclass(frozen=True)
class Float8BenchConfig(BenchConfig):
    """FP8 against BF16 in the native engine, one width after the other.

    All cases of a width hold their models at once. At 1.2B parameters on one GPU: ``model=llama-1b
    model.max_seq_len=4096 bench.micro_batch_size=2 bench.widths=[2048] bench.recipes=[tensorwise]``.
    """

    widths: list[int] = setting([128, 256], "Values of model.hidden_dim to measure; heads keep their size.")
    recipes: list[str] = setting(
        ["tensorwise", "rowwise", "rowwise_bf16_wgrad"],
        "FP8 recipes to measure beside BF16; blockwise needs compute capability 9.0 on a GPU.",
    )
    zero_stage: int = between(2, 0, 3, _STAGE)


@dataclass(frozen=True)
class BlocksBenchConfig(BenchConfig):
    """Recomputed and compiled blocks of the native engine against blocks as they are: step time and activations."""

    cases: list[str] = setting(
        ["none", "selective", "full", "compile", "compile+selective"],
        f"Cases: {', '.join(BLOCK_CASES)}; none is the default of training.",
    )
    precision: str = one_of("auto", "fp32", "bf16", "fp16", "fp8", doc="Precision of every case; auto: by the device.")
    zero_stage: int = between(2, 0, 3, _STAGE)


@dataclass(frozen=True)
class StepBenchConfig(BenchConfig):
    """Training steps on one device: speed, MFU and memory of named cases, one model in memory at a time.

    At 1.2B parameters on one GPU: ``model=llama-1b model.max_seq_len=4096 model.vocab_size=128256 model.compile=blocks
    bench.micro_batch_size=3``.
    """

    warmup_steps: int = at_least(4, 0, "Steps before the first round, which are not timed.")
    rounds: int = at_least(2, 1, _ROUNDS)
    steps: int = at_least(18, 1, _STEPS)
    window_steps: int = at_least(6, 1, BenchConfig.__dataclass_fields__["window_steps"].metadata["doc"])
    data: str = one_of("device", "random", "loader", doc=BenchConfig.__dataclass_fields__["data"].metadata["doc"])
    resident: bool = setting(False, BenchConfig.__dataclass_fields__["resident"].metadata["doc"])
    cases: list[str] = setting(["dtrain", "fsdp2", "plain"], f"Cases: {', '.join(STEP_CASES)}.")
    zero_stage: int = between(2, 0, 3, _STAGE)


@dataclass(frozen=True)
class OptimizerBenchConfig(CheckedRecord):
    """The optimizer phase against torch's sequence of passes, and against the memory's bandwidth."""

    numel: int = at_least(50_000_000, 1024, "Elements; rounded to whole chunks of 1,024.")
    threads: int = at_least(1, 1, "PyTorch threads.")
    device: str = one_of("auto", "cpu", "cuda", doc=_DEVICE)
    compiled: bool = setting(True, "Measure the compiled update too, which needs a compiler.")
    optimizers: list[str] = setting(
        ["adamw", "adam", "sgd", "lion", "adamw-bf16", "muon"], "Optimizers, by the names of optim."
    )
    rounds: int = at_least(10, 1, _ROUNDS)
    out: str | None = setting(None, _OUT, is_path=True)


@dataclass(frozen=True)
class LossHeadBenchConfig(CheckedRecord):
    """Output layer and cross entropy by chunks of tokens, against full logits and PyTorch's own function."""

    tokens: int = at_least(4096, 1, "Tokens of a micro-batch.")
    hidden_dim: int = at_least(256, 1, "Width of the hidden states.")
    vocab_size: int = at_least(32768, 1, "Classes.")
    dtypes: list[str] = setting([], "Dtypes of the operands: fp32, bf16; []: those that the device multiplies fast.")
    threads: int = at_least(1, 1, "PyTorch threads.")
    device: str = one_of("auto", "cpu", "cuda", doc=_DEVICE)
    compiled: bool = setting(True, "Measure compiled full logits too, which needs a compiler.")
    rounds: int = at_least(5, 1, _ROUNDS)
    out: str | None = setting(None, _OUT, is_path=True)


@dataclass(frozen=True)
class ProductsBenchConfig(CheckedRecord):
    """Rates of matrix products by format and shape, of attention, and of copies, by which other figures are divided.

    The Linears and the attention are those of a Llama with the keys of ``model``. On one GPU: ``model=llama-1b
    model.max_seq_len=4096 model.vocab_size=128256 bench.rows=8192 bench.squares=[4096,8192,16384]
    bench.copied=268435456``.
    """

    formats: list[str] = setting([], "Formats of products, such as bf16 or fp8 rowwise; []: those of the device.")
    squares: list[int] = setting([256, 512, 1024], "Sizes of square products.")
    rows: int = at_least(256, 1, "Tokens of the products with weights of `model`, and of attention.")
    copied: int = at_least(1 << 24, 4, "FP32 elements of a copy.")
    case_s: float = at_least(0.05, 0.0, "Seconds for the rounds of a case; there are at least three.")
    limit_s: float | None = setting(None, "Seconds after which no case is begun; null: all are.", above=0.0)
    device: str = one_of("auto", "cpu", "cuda", doc=_DEVICE)
    out: str | None = setting(None, _OUT, is_path=True)


@dataclass(frozen=True)
class MemoryBenchConfig(CheckedRecord):
    """Model states of the native engine on one rank, against the ZeRO formula."""

    precisions: list[str] = setting(["bf16", "fp8", "fp32"], "Precisions to measure.")
    stages: list[int] = setting([0, 1, 2, 3], "ZeRO stages to measure.")
    device: str = one_of("auto", "cpu", "cuda", doc=_DEVICE)
    out: str | None = setting(None, _OUT, is_path=True)


@dataclass(frozen=True)
class ProfileBenchConfig(CheckedRecord):
    """A training step of the native engine by class of kernel, and its optimizer phase, on random tokens."""

    precisions: list[str] = setting(["bf16"], "Precisions to profile.")
    micro_batch_size: int = at_least(2, 1, "Sequences in a step; halved if they do not fit the GPU's memory.")
    warmup_steps: int = at_least(4, 1, "Steps before those that are timed.")
    steps: int = at_least(5, 1, "Steps that are timed; one more is profiled.")
    zero_stage: int = between(2, 0, 3, _STAGE)
    device: str = one_of("auto", "cpu", "cuda", doc=_DEVICE)
    keep_trace: str | None = setting(None, "Folder for the raw traces; null: they are not kept.", is_path=True)
    out: str | None = setting(None, _OUT, is_path=True)


@dataclass(frozen=True)
class HostBenchConfig(MeasurementConfig):
    """Host time of the native engine's step by part, beside a plain loop of the same model.

    Its blocks are so narrow by default that nearly all time is the host's.
    """

    stages: list[int] = setting([2, 3], "ZeRO stages to measure.")
    precisions: list[str] = setting(["fp32", "bf16"], "Precisions to measure.")
    micro_batch_size: int = at_least(1, 1, "Sequences in a step of one rank.")
    # by then every buffer that is used in turn has been used; the first audit is due after 100 steps
    warmup_steps: int = at_least(24, 1, "Steps before the first round, which are not timed.")
    steps: int = at_least(4, 1, _STEPS)

    def _check(self) -> None:
        super()._check()
        for key, known in {"stages": range(4), "precisions": SETTINGS["precision"]}.items():
            if other := [value for value in getattr(self, key) if value not in known]:
                raise ConfigError(f"{self._entry(key)}: {other[0]} is not one of {', '.join(map(str, known))}")


@dataclass(frozen=True)
class CollectivesBenchConfig(MeasurementConfig):
    """Each collective of a step, by size and transport: sockets and shared memory on CPUs, NCCL on GPUs."""

    ranks: int = at_least(2, 2, _RANKS)
    sizes: list[int] = setting([1 << 16, 1 << 20, 1 << 23], "Elements of a flat buffer.")


@dataclass(frozen=True)
class CheckpointBenchConfig(MeasurementConfig):
    """Time that training stands still for a save, and time until the save is complete on the disk."""

    sizes: list[int] = setting([131], "Megabytes (10^6 bytes) of masters and moments on a rank.")
    dir: str = setting(".", "Folder on the disk to measure; a folder made in it is removed at the end.", is_path=True)


@dataclass(frozen=True)
class DataBenchConfig(CheckedRecord):
    """Tokenizing against the library alone, reading token shards, and packing documents against padding them.

    The corpus is the standard library's text, cut into documents whose lengths are log-normal.
    """

    copies: int = at_least(2, 1, "Times that the corpus holds the standard library's text, 12 MB.")
    median_length: int = at_least(600, 2, "Median length of a document, in characters.")
    sigma: float = at_least(1.0, 0.0, "Standard deviation of the logarithm of the length.")
    vocab_size: int = at_least(8192, 256, "Tokens of the tokenizer that is trained for this.")
    micro_batch_size: int = at_least(8, 1, "Samples of a batch.")
    reads: int = at_least(512, 1, "Batches that are read in one round.")
    documents: int = at_least(32, 1, "Documents that the model computes in one round.")
    threads: int = at_least(1, 1, "PyTorch threads.")
    device: str = one_of("auto", "cpu", "cuda", doc=_DEVICE)
    rounds: int = at_least(5, 1, _ROUNDS)
    out: str | None = setting(None, _OUT, is_path=True)


Bench = TypeVar("Bench", covariant=True)
"""Keys of ``bench``; ``Suite.primary`` of config/commands.py makes the schema that has them."""

TrainingBench = TypeVar("TrainingBench", bound=BenchConfig, covariant=True)


@dataclass(frozen=True)
class BenchSuite(CheckedRecord, Generic[Bench]):
    """One run of a suite of ``dtrain bench``."""

    bench: Bench


@dataclass(frozen=True)
class ModelSuite(BenchSuite[Bench]):
    model: ModelConfig = group(ModelConfig)


@dataclass(frozen=True)
class ProfileSuite(CheckedRecord, Generic[Bench]):
    seed: int = at_least(0, 0, "Seed of the weights.")
    bench: Bench = group(ProfileBenchConfig)
    model: ModelConfig = group(ModelConfig)
    optim: OptimKeys = group(OptimConfig, Optimizer)


@dataclass(frozen=True)
class TrainingSuite(CheckedRecord, Generic[TrainingBench]):
    """One run of a suite that trains cases."""

    seed: int = at_least(0, 0, "Seed of weights and samples.")
    bench: TrainingBench = group(BenchConfig)
    model: ModelConfig = group(ModelConfig)
    data: DataConfig = group(StdlibDataConfig, DataConfig)
    optim: OptimKeys = group(OptimConfig, Optimizer)


@dataclass(frozen=True)
class Float8Suite(TrainingSuite[TrainingBench]):
    float8: Float8 = group(Float8)  # the recipe of a case replaces its own


@dataclass(frozen=True)
class ParityConfig(CheckedRecord):
    """Engines to compare, with what and over how many steps, and the permitted deviation."""

    reference: str = one_of(
        "oracle",
        "cpu",
        doc="oracle: plain PyTorch in FP32, all weights of every step; cpu: losses of the native engine in FP32 on the "
        "CPU, for the kernels of a new GPU.",
    )
    engines: list[str] | None = setting(
        None, "Some of native, fsdp2, deepspeed, ddp; null: all that can train this run here."
    )
    precisions: list[str] | None = setting(
        None, "With reference=cpu: precisions of each engine, in this order; null: that of the run."
    )
    stages: list[int] | None = setting(
        None, "With reference=cpu: ZeRO stages of each engine that has them, in this order; null: its own."
    )
    ranks: int = at_least(2, 1, "Ranks of each engine; the reference is one process.")
    steps: int = at_least(20, 2, "Steps to attempt.")
    micro_batch_size: int = at_least(2, 1, "Sequences in one forward on one rank.")
    global_batch_size: int = at_least(8, 1, "Sequences in one step over all ranks.")
    loss_bound: float | None = at_least(
        None, 0.0, "Largest relative deviation of a loss; null: by precision, see docs/trust/parity.md."
    )
    weight_bound: float | None = at_least(
        None, 0.0, "Largest deviation of a tensor, relative to its distance from the start; null: by precision."
    )
    device: str = one_of("auto", "cpu", "cuda", doc=_DEVICE)
    threads_per_rank: int = at_least(1, 1, _THREADS)
    timeout_s: float = at_least(
        600.0, 1.0, "Seconds after which an unfinished collective, or a case of reference=cpu, ends the engine."
    )


@dataclass(frozen=True)
class EngineSettings(CheckedRecord):
    """Keys of every engine, each under its name."""

    native: Native = group(Native)
    fsdp2: FSDP2 = group(FSDP2)
    deepspeed: DeepSpeed = group(DeepSpeed)
    ddp: DDP = group(DDP)


@dataclass(frozen=True)
class ParitySuiteConfig(CheckedRecord):
    run_dir: str | None = setting(None, "Directory of the report; null: `runs/parity-<date>_<time>`.", is_path=True)
    seed: int = at_least(0, 0, "Seed of weights, sample order and dropout.")
    parity: ParityConfig = group(ParityConfig)
    engines: EngineSettings = group(EngineSettings)
    precision: PrecisionConfig = group(PrecisionConfig)
    model: ModelConfig = group(ModelConfig)
    data: DataConfig = group(StdlibDataConfig, DataConfig)
    optim: OptimKeys = group(OptimConfig, Optimizer)
    schedule: ScheduleConfig = group(Cosine, ScheduleConfig)

    def training(self, engine: str) -> RunConfig:
        parity = self.parity
        return RunConfig(
            seed=self.seed,
            train=TrainConfig(
                steps=parity.steps,
                micro_batch_size=parity.micro_batch_size,
                global_batch_size=parity.global_batch_size,
            ),
            engine=getattr(self.engines, engine),
            precision=self.precision,
            model=self.model,
            data=self.data,
            optim=self.optim,
            schedule=self.schedule,
            launch=LaunchConfig(
                device=parity.device, threads_per_rank=parity.threads_per_rank, timeout_s=parity.timeout_s
            ),
        )


@dataclass(frozen=True)
class AcceptConfig(CheckedRecord):
    """Keys of ``dtrain accept``. It has no model: each job takes shapes that fit the device."""

    goal: str = one_of(
        "all",
        "facts",
        "figures",
        doc="facts: what works; figures: how fast; all: both, as the owner of a machine wants it.",
    )
    limit_s: float | None = setting(
        None,
        "Seconds from the start of the command, which nothing outlives; null: facts 340, figures 280, all 1500.",
        above=30.0,
    )
    archive: str | None = setting(
        None, "File (tar.gz) that always has what `out` has, rewritten after each partial result.", is_path=True
    )
    caches: str | None = setting(
        None, "File (tar.gz) of compilers' caches: used if it exists, and rewritten at the end.", is_path=True
    )
    out: str | None = setting(
        None,
        "Directory of the results; jobs that are done there are not repeated; null: `runs/accept-<date>_<time>`.",
        is_path=True,
    )
    parts: list[str] | None = setting(None, "Parts of the page to measure, such as `rates,steps`; null: all.")
    device: str = one_of("auto", "cpu", "cuda", doc=_DEVICE)
    keep_trace: bool = setting(False, "Keep the raw traces of profiles in `out/traces`.")
