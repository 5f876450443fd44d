"""The typed schema of a run: frozen dataclasses, one a Hydra group.

YAML under ``conf/`` only picks and overrides these defaults. Constraints that concern one field live here (choices and
ranges, as field metadata); constraints across groups live in ``config.checks``. Only ``config.compose``, ``resolve``
and ``explain`` know Hydra. Nothing here imports torch, so ``dtrain --help`` stays fast.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Generic, TypeVar

from dtrain.errors import ConfigError, nearest


def _one_of(default: str, *choices: str | bool) -> Any:
    return field(default=default, metadata={"choices": (default, *choices)})


def _at_least(default: Any, minimum: float) -> Any:
    return field(default=default, metadata={"min": minimum})


def _above(default: Any, bound: float, maximum: float | None = None) -> Any:
    return field(default=default, metadata={"above": bound} | ({} if maximum is None else {"max": maximum}))


def _between(default: Any, minimum: float, maximum: float) -> Any:
    return field(default=default, metadata={"min": minimum, "max": maximum})


@dataclass(frozen=True)
class TrainConfig:
    """How long to train, in which batches, and how often to look."""

    steps: int = _at_least(200, 1)  # attempted steps
    micro_batch_size: int = _at_least(8, 1)  # sequences in one forward on one rank
    global_batch_size: int = _at_least(16, 1)  # sequences in one step over all ranks; accumulation follows from it
    log_every: int = _at_least(10, 1)
    eval_every: int = _at_least(100, 0)  # 0: only at the end
    eval_batches: int = _at_least(16, 1)  # micro-batches of validation over all ranks
    save_every: int = _at_least(100, 0)  # 0: only at the end
    sample_tokens: int = _at_least(160, 0)  # length of the text sample written at the end; 0: none


@dataclass(frozen=True)
class EngineConfig:
    """What does the training step. What an engine cannot do is refused: dtrain/config/capabilities.py."""

    name: str = "native"
    zero_stage: int = _between(2, 0, 3)  # what is sharded
    reproducible: bool = False  # equal bits at any world size and stage
    reduce_dtype: str = _one_of("auto", "fp32", "bf16", "fp16")  # of gradients on the wire; auto: see the engine
    max_consecutive_skips: int = _at_least(50, 1)  # skipped steps in a row that end the run


@dataclass(frozen=True)
class NativeEngineConfig(EngineConfig):
    """dtrain's own engine: sharded masters, leaves in the replica dtype, one vote a step."""

    name: str = "native"
    grad_reduction: str = _one_of("auto", "all_reduce", "reduce_scatter")  # stage 1 only; auto: reduce_scatter
    reshard_after_forward: bool = True  # stage 3 only: free a parameter group after its forward, else after backward
    prefetch: int = _at_least(1, 0)  # stage 3 only: parameter groups gathered ahead of their use
    keep_gathered: list[str] = field(default_factory=list)  # stage 3 only: name patterns gathered all through a step


@dataclass(frozen=True)
class FSDP2EngineConfig(EngineConfig):
    """PyTorch's ``fully_shard`` below dtrain's vote; stage 2 keeps gathered weights until backward, 3 frees them."""

    name: str = "fsdp2"


@dataclass(frozen=True)
class DeepSpeedEngineConfig(EngineConfig):
    """DeepSpeed's ZeRO below dtrain's vote."""

    name: str = "deepspeed"
    offload: str = _one_of("none", "cpu")  # where masters and moments lie


@dataclass(frozen=True)
class DDPEngineConfig(EngineConfig):
    """PyTorch's DistributedDataParallel: FP32 weights on every rank, cast by autocast."""

    name: str = "ddp"
    zero_stage: int = _between(0, 0, 3)


@dataclass(frozen=True)
class LossScaleConfig:
    """How the loss is scaled. ``auto``: dynamic where FP16 is computed, none elsewhere."""

    mode: str = _one_of("auto", "none", "static", "dynamic", "calibrated")
    init: float = _at_least(65536.0, 2.0**-24)  # also the constant of mode static
    growth_factor: float = _at_least(2.0, 1.0)
    backoff_factor: float = _above(0.5, 0.0, 1.0)
    growth_interval: int = _at_least(2000, 1)  # clean steps before the scale grows
    hysteresis: int = _at_least(1, 1)  # number of overflows that make the scale back off
    min: float = _above(2.0**-14, 0.0)
    max: float = _at_least(2.0**24, 1.0)
    calibration_steps: int = _at_least(10, 1)  # applied steps whose largest gradient mode calibrated measures
    margin: float = _at_least(8.0, 1.0)  # its scale x that gradient x margin is at most 65,504


RULE_FORMATS = ("fp32", "bf16", "fp16", "fp8")
"""What a rule can give a module."""

_REFUSED_FORMATS = {
    "tf32": "tf32 is a mode of the whole process, not of a module: backward runs long after a module's forward has "
    "ended; use precision=tf32, and no rule",
    "mxfp8": "mxfp8 has a scale for each block of 32 elements, which the Tensor Cores of Blackwell apply and those of "
    "Hopper do not; use fp8",
    "mxfp4": "mxfp4 needs the FP4 Tensor Cores of Blackwell, and a recipe of its own to train; use fp8",
    "nvfp4": "nvfp4 needs the FP4 Tensor Cores of Blackwell, and a recipe of its own to train; use fp8",
}


def unsupported_format_reason(name: str) -> str:
    """Why a format that people know is none of dtrain's (as a rule); empty where ``name`` is no such format."""
    return _REFUSED_FORMATS.get(name, "")


def check_rules(rules: Iterable[tuple[str, str]]) -> None:
    """Checks the formats of pairs of pattern and format.

    Raises:
        ConfigError: one that no rule can give, with the reason.
    """
    for pattern, name in rules:
        if name not in RULE_FORMATS:
            reason = unsupported_format_reason(name) if isinstance(name, str) else ""
            hint = f"'{name}' is not one of {', '.join(RULE_FORMATS)}{_hint(name, RULE_FORMATS)}"
            raise ConfigError(f"precision rule '{pattern}': {reason or hint}")


@dataclass(frozen=True)
class Float8Config:
    """How FP8 products are formed; used where the precision or a rule is fp8. docs/precision.md has the recipes."""

    recipe: str = _one_of("tensorwise", "rowwise")  # one scale a tensor, or one for each row and column
    weight_scale: str = _one_of("current", "delayed")  # delayed: from the weights of the step before (tensorwise)
    grad_format: str = _one_of("auto", "e5m2", "e4m3")  # auto: e5m2 tensorwise, e4m3 rowwise
    emulate: bool | str = _one_of("auto", True, False)  # in FP32; auto: where there are no FP8 Tensor Cores
    choice: str = _one_of("auto", "timed", "all")  # which products; auto: timed where nothing is emulated
    num_rows: int | None = _at_least(None, 1)  # of the timed products; null: micro_batch_size x max_seq_len
    fast_accumulation: bool = False  # of forward products on Hopper
    compile: bool | str = _one_of("auto", True, False)  # the casts; auto: on a GPU that has a compiler


@dataclass(frozen=True)
class PrecisionConfig:
    """Which numbers the model computes in. Masters and optimizer state are FP32 in all of them."""

    name: str = _one_of("auto", "fp32", "tf32", "bf16", "fp16", "fp8")
    rules: dict[Any, str] = field(default_factory=dict)  # {name pattern of modules: format}; the last match decides
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    float8: Float8Config = field(default_factory=Float8Config)


DEFAULT_FACTORY = "dtrain.models.transformer:build"
GPT2_FACTORY = "dtrain.models.gpt2:build"
VOCAB_MULTIPLE = 64  # to which their vocabulary is padded
FACTORY_FORM = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""package.module:function"""


@dataclass(frozen=True)
class ModelConfig:
    """The model. ``factory(config, vocab_size)`` returns the ``nn.Module``; the default builds the transformer."""

    name: str = "tiny"
    factory: str = DEFAULT_FACTORY  # package.module:function
    num_layers: int = _at_least(4, 1)
    hidden_dim: int = _at_least(256, 1)
    num_heads: int = _at_least(4, 1)
    num_kv_heads: int | None = _at_least(None, 1)  # null: as many as num_heads
    ffn_dim: int | None = _at_least(None, 1)  # null: 8/3 of hidden_dim, rounded up to 64; gpt2: 4 x hidden_dim
    max_seq_len: int = _at_least(256, 1)
    vocab_size: int | None = _at_least(None, 1)  # null: the data's; else at least as many
    dropout: float = _between(0.0, 0.0, 1.0)
    tie_embeddings: bool = True
    rope_theta: float = _at_least(10000.0, 1.0)
    norm_eps: float = _at_least(1e-5, 0.0)
    args: dict[str, Any] = field(default_factory=dict)  # free keys for a factory of your own


@dataclass(frozen=True)
class DataConfig:
    """Where samples come from. Each source has its own subclass."""

    name: str = "stdlib"
    validation_percent: float = _between(5.0, 0.0, 50.0)  # share of files held out, by a hash of the relative path


@dataclass(frozen=True)
class StdlibDataConfig(DataConfig):
    """The text of the running Python's standard library, as byte tokens: real text, no download."""

    name: str = "stdlib"


@dataclass(frozen=True)
class TextDataConfig(DataConfig):
    """Any text files by glob, as byte tokens."""

    name: str = "text"
    files: str = ""  # a glob such as '/data/**/*.txt'


@dataclass(frozen=True)
class OptimConfig:
    """AdamW on the FP32 masters (Loshchilov and Hutter, 2019); norms and biases are not decayed."""

    name: str = _one_of("adamw")
    lr: float = _at_least(1e-3, 0.0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = _at_least(1e-8, 0.0)
    weight_decay: float = _at_least(0.1, 0.0)
    max_grad_norm: float | None = _above(1.0, 0.0)  # null: no clipping
    compile: bool | str = _one_of("auto", True, False)  # the update; auto: on a GPU that has a compiler


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate as a function of applied steps; ``total_steps`` follows ``train.steps``."""

    name: str = "cosine"
    warmup_steps: int = _at_least(20, 0)


@dataclass(frozen=True)
class CosineConfig(ScheduleConfig):
    """Linear warm-up, then half a cosine down to ``min_ratio`` of the peak."""

    name: str = "cosine"
    min_ratio: float = _between(0.1, 0.0, 1.0)


@dataclass(frozen=True)
class LinearConfig(ScheduleConfig):
    """Linear warm-up, then a straight line down to ``min_ratio`` of the peak."""

    name: str = "linear"
    min_ratio: float = _between(0.1, 0.0, 1.0)


@dataclass(frozen=True)
class ConstantConfig(ScheduleConfig):
    """Linear warm-up, then the peak for ever."""

    name: str = "constant"


@dataclass(frozen=True)
class WSDConfig(ScheduleConfig):
    """Warm-up, stable, decay: the last ``decay_steps`` fall in a straight line to ``min_ratio`` of the peak."""

    name: str = "wsd"
    decay_steps: int = _at_least(40, 1)
    min_ratio: float = _between(0.0, 0.0, 1.0)


@dataclass(frozen=True)
class TrackerConfig:
    """Where metrics go beside ``metrics.jsonl``, which is always written."""

    name: str = "none"


@dataclass(frozen=True)
class WandbConfig(TrackerConfig):
    """Weights & Biases: online when logged in, offline otherwise, never a prompt; rank 0 only."""

    name: str = "wandb"
    project: str = "dtrain"
    entity: str | None = None
    run_name: str | None = None  # null: the name of the run directory
    tags: list[str] = field(default_factory=list)
    mode: str = _one_of("auto", "online", "offline", "disabled")


@dataclass(frozen=True)
class TensorboardConfig(TrackerConfig):
    """TensorBoard event files in the run directory; needs ``pip install tensorboard``."""

    name: str = "tensorboard"


@dataclass(frozen=True)
class CheckpointConfig:
    """How checkpoints are saved, and which are kept."""

    asynchronous: bool = True  # training goes on while they are written; takes host memory for one more shard
    when_busy: str = _one_of("wait", "skip")  # where one is due while another is being written
    keep_last: int = _at_least(2, 1)  # the newest so many
    keep_every: int = _at_least(0, 0)  # those of every so many steps, for ever; 0: none
    # so many of the least validation loss; above 0 each save comes after a validation, but not at a stop signal
    keep_best: int = _at_least(0, 0)
    save_at_end: bool = True


@dataclass(frozen=True)
class LaunchConfig:
    """The machine: processes, device, threads and timeouts."""

    num_processes: int | str | None = _at_least(None, 1)  # ranks to start; auto: one a GPU; null: none, this is one
    device: str = _one_of("auto", "cpu", "cuda")
    threads_per_rank: int | None = _at_least(None, 1)  # null: cores / ranks on this host; 1 when reproducible
    timeout_s: float = _at_least(600.0, 1.0)  # a collective that takes longer ends the run
    shared_memory: bool = True  # CPU ranks of one host read each other's buffers instead of sending them


@dataclass(frozen=True)
class RunConfig:
    """One training run, resolved and checked; what ``config.yaml`` in the run directory holds."""

    run_dir: str | None = None  # null: runs/<date>_<time>, chosen once for all ranks
    seed: int = _at_least(0, 0)
    resume: str = "auto"  # auto: the newest checkpoint of run_dir that verifies | none | a path
    train: TrainConfig = field(default_factory=TrainConfig)
    engine: EngineConfig = field(default_factory=NativeEngineConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=StdlibDataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=CosineConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)


@dataclass(frozen=True)
class BenchConfig:
    """What every suite of ``dtrain bench`` takes. Contenders have their turns round by round, so noise meets all."""

    ranks: int = _at_least(1, 1)
    threads_per_rank: int = _at_least(1, 1)
    device: str = _one_of("auto", "cpu", "cuda")
    micro_batch_size: int = _at_least(4, 1)  # sequences in a step of one rank
    warmup_steps: int = _at_least(2, 0)  # before the first round, not timed
    rounds: int = _at_least(10, 1)
    steps: int = _at_least(3, 1)  # of one turn
    out: str | None = None  # the JSON; null: runs/bench-<suite>-<date>_<time>.json


@dataclass(frozen=True)
class EngineBenchConfig(BenchConfig):
    """dtrain's engines against a plain PyTorch loop on one rank, and against other libraries on several.

    Compute-bound by default: 10.9M parameters, 1,024 tokens a rank and step. Communication-bound, 43.0M parameters and
    128 tokens: ``model.hidden_dim=768 model.num_heads=12 model.max_seq_len=128 bench.micro_batch_size=1``.
    """

    ranks: int = _at_least(2, 1)
    stages: list[int] = field(default_factory=lambda: [0, 1, 2, 3])  # of the native engine, at that number of ranks
    engines: list[str] | None = None  # others of dtrain's, as fsdp2 or fsdp2:3 (stage), each beside the peer that does
    # the same work; null: all that are installed, [] none
    peers: list[str] | None = None  # some of bench.peers.PEERS; null: all, [] none; one not installed is left out
    precision: str = _one_of("bf16", "fp32")
    starts: int = _at_least(5, 0)  # how often `dtrain train` is started to time its first step


@dataclass(frozen=True)
class PrecisionBenchConfig(BenchConfig):
    """Mixed precision against FP32, all else equal."""

    precisions: list[str] = field(default_factory=list)  # beside fp32; empty: those that the device is good at
    zero_stage: int = _between(2, 0, 3)


@dataclass(frozen=True)
class SuiteConfig:
    """One run of ``dtrain bench``; the keys it shares with training mean the same there."""

    seed: int = _at_least(0, 0)
    bench: BenchConfig = field(default_factory=BenchConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=StdlibDataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)


@dataclass(frozen=True)
class EngineSuiteConfig(SuiteConfig):
    """``dtrain bench engine``."""

    bench: EngineBenchConfig = field(default_factory=EngineBenchConfig)


@dataclass(frozen=True)
class PrecisionSuiteConfig(SuiteConfig):
    """``dtrain bench precision``."""

    bench: PrecisionBenchConfig = field(default_factory=PrecisionBenchConfig)


@dataclass(frozen=True)
class VoteBenchConfig(BenchConfig):
    """The vote inside real steps, and a dynamic loss scale against none, all else equal."""

    ranks: int = _at_least(2, 1)
    rounds: int = _at_least(20, 1)
    steps: int = _at_least(5, 1)
    zero_stage: int = _between(2, 0, 3)


@dataclass(frozen=True)
class VoteSuiteConfig(SuiteConfig):
    """``dtrain bench vote``."""

    bench: VoteBenchConfig = field(default_factory=VoteBenchConfig)


@dataclass(frozen=True)
class Float8BenchConfig(BenchConfig):
    """FP8 against BF16 of the native engine, one width after the other.

    All contenders of a width hold their models at once. At 1.2B parameters on one GPU: ``model=llama-1b
    model.max_seq_len=4096 bench.micro_batch_size=2 bench.widths=[2048] bench.recipes=[tensorwise]``.
    """

    widths: list[int] = field(default_factory=lambda: [128, 256])  # model.hidden_dim of each; heads keep their size
    recipes: list[str] = field(default_factory=lambda: ["tensorwise", "rowwise"])  # raced beside BF16
    zero_stage: int = _between(2, 0, 3)


@dataclass(frozen=True)
class Float8SuiteConfig(SuiteConfig):
    """``dtrain bench float8``; ``bench.recipes`` takes the place of ``float8.recipe``."""

    bench: Float8BenchConfig = field(default_factory=Float8BenchConfig)
    float8: Float8Config = field(default_factory=Float8Config)


@dataclass(frozen=True)
class OptimizerBenchConfig:
    """The optimizer phase: ours, torch's sequence of passes, and the memory's own speed, in turn."""

    numel: int = _at_least(50_000_000, 1024)  # elements; whole chunks of 1,024 are taken
    threads: int = _at_least(1, 1)
    device: str = _one_of("auto", "cpu", "cuda")
    compiled: bool = True  # also the compiled update, which needs a compiler
    rounds: int = _at_least(10, 1)
    out: str | None = None  # the JSON; null: runs/bench-<suite>-<date>_<time>.json


@dataclass(frozen=True)
class OptimizerSuiteConfig:
    """``dtrain bench optimizer``."""

    bench: OptimizerBenchConfig = field(default_factory=OptimizerBenchConfig)


@dataclass(frozen=True)
class CollectivesBenchConfig:
    """Each collective of a step, by size and way: sockets and shared memory on CPU, NCCL on GPU."""

    ranks: int = _at_least(2, 2)
    threads_per_rank: int = _at_least(1, 1)
    device: str = _one_of("auto", "cpu", "cuda")
    sizes: list[int] = field(default_factory=lambda: [1 << 16, 1 << 20, 1 << 23])  # elements of a flat buffer
    rounds: int = _at_least(10, 1)
    out: str | None = None  # the JSON; null: runs/bench-<suite>-<date>_<time>.json


@dataclass(frozen=True)
class CollectivesSuiteConfig:
    """``dtrain bench collectives``."""

    bench: CollectivesBenchConfig = field(default_factory=CollectivesBenchConfig)


@dataclass(frozen=True)
class CheckpointBenchConfig:
    """A save: how long training stands still for it, and how long it takes until it is complete on the disk."""

    ranks: int = _at_least(1, 1)
    threads_per_rank: int = _at_least(1, 1)
    device: str = _one_of("auto", "cpu", "cuda")
    sizes: list[int] = field(default_factory=lambda: [131])  # MB (10^6 bytes) of masters and moments a rank
    dir: str = "."  # on the disk to measure; a folder is made there, and removed at the end
    rounds: int = _at_least(10, 1)
    out: str | None = None  # the JSON; null: runs/bench-<suite>-<date>_<time>.json


@dataclass(frozen=True)
class CheckpointSuiteConfig:
    """``dtrain bench checkpoint``."""

    bench: CheckpointBenchConfig = field(default_factory=CheckpointBenchConfig)


@dataclass(frozen=True)
class ParityConfig:
    """What is compared, over how many steps, and how far apart is too far."""

    engines: list[str] | None = None  # of native, fsdp2, deepspeed, ddp; null: all that can do it here
    ranks: int = _at_least(2, 1)  # of each engine; the oracle is one process
    steps: int = _at_least(20, 2)
    micro_batch_size: int = _at_least(2, 1)  # sequences in one forward
    global_batch_size: int = _at_least(8, 1)  # sequences in one step over all ranks; accumulation follows from it
    loss_bound: float | None = _at_least(None, 0.0)  # relative; null: by precision, docs/parity.md
    weight_bound: float | None = _at_least(None, 0.0)  # of a tensor, over its way from the start; null: by precision
    device: str = _one_of("auto", "cpu", "cuda")
    threads_per_rank: int = _at_least(1, 1)
    timeout_s: float = _at_least(600.0, 1.0)  # a collective that takes longer ends the engine


@dataclass(frozen=True)
class EngineSettings:
    """The keys of every engine, each under its name."""

    native: NativeEngineConfig = field(default_factory=NativeEngineConfig)
    fsdp2: FSDP2EngineConfig = field(default_factory=FSDP2EngineConfig)
    deepspeed: DeepSpeedEngineConfig = field(default_factory=DeepSpeedEngineConfig)
    ddp: DDPEngineConfig = field(default_factory=DDPEngineConfig)


@dataclass(frozen=True)
class ParitySuiteConfig:
    """``dtrain parity``; the keys it shares with training mean the same there."""

    run_dir: str | None = None  # null: runs/parity-<date>_<time>
    seed: int = _at_least(0, 0)
    parity: ParityConfig = field(default_factory=ParityConfig)
    engines: EngineSettings = field(default_factory=EngineSettings)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=StdlibDataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=CosineConfig)

    def training(self, engine: str) -> RunConfig:
        """The training run that is made of it with one engine."""
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


Root = TypeVar(
    "Root",
    RunConfig,
    ParitySuiteConfig,
    EngineSuiteConfig,
    PrecisionSuiteConfig,
    VoteSuiteConfig,
    Float8SuiteConfig,
    OptimizerSuiteConfig,
    CollectivesSuiteConfig,
    CheckpointSuiteConfig,
)


@dataclass(frozen=True)
class Primary(Generic[Root]):
    """A command's configuration: ``conf/<name>.yaml`` builds on ``schema``, which Hydra knows as ``<name>_schema``."""

    name: str
    command: str
    schema: type[Root]


TRAIN = Primary("train", "train", RunConfig)
BENCH_ENGINE = Primary("bench-engine", "bench engine", EngineSuiteConfig)
BENCH_PRECISION = Primary("bench-precision", "bench precision", PrecisionSuiteConfig)
BENCH_OPTIMIZER = Primary("bench-optimizer", "bench optimizer", OptimizerSuiteConfig)
BENCH_COLLECTIVES = Primary("bench-collectives", "bench collectives", CollectivesSuiteConfig)
BENCH_CHECKPOINT = Primary("bench-checkpoint", "bench checkpoint", CheckpointSuiteConfig)
BENCH_VOTE = Primary("bench-vote", "bench vote", VoteSuiteConfig)
BENCH_FLOAT8 = Primary("bench-float8", "bench float8", Float8SuiteConfig)
PARITY = Primary("parity", "parity", ParitySuiteConfig)
PRIMARIES: tuple[Primary[Any], ...] = (
    TRAIN,
    PARITY,
    BENCH_ENGINE,
    BENCH_PRECISION,
    BENCH_OPTIMIZER,
    BENCH_COLLECTIVES,
    BENCH_CHECKPOINT,
    BENCH_VOTE,
    BENCH_FLOAT8,
)

GROUP_OPTIONS: dict[str, dict[str, type[Any]]] = {
    "engine": {
        "native": NativeEngineConfig,
        "fsdp2": FSDP2EngineConfig,
        "deepspeed": DeepSpeedEngineConfig,
        "ddp": DDPEngineConfig,
    },
    "data": {"stdlib": StdlibDataConfig, "text": TextDataConfig},
    "schedule": {"cosine": CosineConfig, "linear": LinearConfig, "constant": ConstantConfig, "wsd": WSDConfig},
    "tracker": {"none": TrackerConfig, "wandb": WandbConfig, "tensorboard": TensorboardConfig},
}
"""Groups whose options have different keys: option name -> its schema. All other groups have one schema."""


def check_fields(config: Any, prefix: str = "") -> None:
    """Checks every ``choices``/``min``/``above``/``max`` of ``config`` and of the records inside it.

    Raises:
        ConfigError: naming the first key at fault, its value and what is allowed.
    """
    for path, value, metadata in _leaves(config, prefix):
        choices = metadata.get("choices")
        if choices is not None and value not in choices:
            words = tuple(str(choice).lower() if isinstance(choice, bool) else choice for choice in choices)
            raise ConfigError(f"{path}={value} is not one of {', '.join(words)}{_hint(value, words)}")
        if value is None or isinstance(value, (str, bool)):
            continue
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{path}={value} is not a finite number")
        low, high = metadata.get("min"), metadata.get("max")
        if low is not None and not value >= low:
            raise ConfigError(f"{path}={value} is too small; it must be at least {low:g}")
        above = metadata.get("above")
        if above is not None and not value > above:
            raise ConfigError(f"{path}={value} is too small; it must be above {above:g}")
        if high is not None and not value <= high:
            raise ConfigError(f"{path}={value} is too large; it must be at most {high:g}")


def _hint(value: Any, choices: tuple[str, ...]) -> str:
    hint = nearest(str(value), choices)
    return hint if hint.startswith("; did") else ""


def _leaves(config: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    for item in fields(config):
        path = f"{prefix}{item.name}"
        value = getattr(config, item.name)
        if is_dataclass(value):
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value, item.metadata
