"""The typed schema of a run: one frozen record per Hydra group.

YAML under ``conf/`` only picks and overrides these defaults. Every record checks itself (``config.fields``); what
crosses records is in ``cli.checks``. The records of scripts too are in ``config.{engines,optim,precision,schedule}``.
Nothing here imports torch, so that ``dtrain train --help`` answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dtrain.config.audit import Audit
from dtrain.config.data import (
    ArraysDataConfig,
    ChatDataConfig,
    DataConfig,
    FriedmanDataConfig,
    GlyphsDataConfig,
    ImagesDataConfig,
    StdlibDataConfig,
    TextDataConfig,
    TokensDataConfig,
)
from dtrain.config.engines import ENGINES, EngineConfig, Native
from dtrain.config.fields import CheckedRecord, above, at_least, group, one_of, option, setting
from dtrain.config.growth import BY_STEP, BatchGrowth, by_step
from dtrain.config.model import ModelConfig
from dtrain.config.optim import OPTIM_KEYS, EmaConfig, OptimConfig, Optimizer, OptimKeys
from dtrain.config.precision import PrecisionConfig
from dtrain.config.schedule import WSD, Constant, Cosine, Linear, ScheduleConfig
from dtrain.errors import ConfigError


@dataclass(frozen=True)
class TrainConfig(CheckedRecord):
    """Length of the run, batch sizes, and how often it logs, validates and saves."""

    steps: int = at_least(200, 1, "Steps to attempt; skipped steps count.")
    micro_batch_size: int = at_least(8, 1, "Samples in one forward on one rank.")
    global_batch_size: Any = setting(
        16,
        "Samples in one step over all ranks, from which the number of accumulated micro-batches follows; or by "
        "attempted steps: {0: 16, 1000: 64}.",
        kind=int | dict[int, int],
        what=BY_STEP,
        min=1,
    )
    seq_len: Any = setting(
        None,
        "Tokens in a row, or by attempted steps: {0: 64, 1000: 256}; shorter than max_seq_len: sequences are cut into "
        "rows. null: max_seq_len.",
        kind=int | dict[int, int] | None,
        what=f"null, {BY_STEP}",
        min=1,
    )
    log_every: int = at_least(10, 1, "Steps from one logged line to the next.")
    eval_every: int = at_least(100, 0, "Steps from one validation to the next; 0: only at the end.")
    eval_batches: int = at_least(
        16, 0, "Micro-batches of a validation, over all ranks; 0: all validation samples, each once."
    )
    save_every: int = at_least(100, 0, "Steps from one checkpoint to the next; 0: only at the end.")
    collect_garbage_every: int = at_least(
        50,
        0,
        "Steps from one collection of Python's garbage to the next, after the same ones on all ranks, and after each "
        "validation and save; cycles of objects hold their tensors until then. 0: Python decides, on each rank alone.",
    )
    sample_tokens: int = at_least(
        160, 0, "Length of the text sample written at the end; 0: none, and no picture of other tasks."
    )

    def _check(self) -> None:
        for name in ("global_batch_size", "seq_len"):
            value = getattr(self, name)
            if isinstance(value, dict):
                object.__setattr__(self, name, by_step(value, self._key(name)))


@dataclass(frozen=True)
class TrackerConfig(CheckedRecord):
    """Service that gets the metrics too; ``metrics.jsonl`` is always written."""

    name: str = option("none")


@dataclass(frozen=True)
class WandbConfig(TrackerConfig):
    """Weights & Biases: online when logged in, offline otherwise, never a prompt; rank 0 only."""

    name: str = option("wandb")
    project: str = setting("dtrain", "Project on Weights & Biases.")
    entity: str | None = setting(None, "Team or user; null: the default of your login.")
    run_name: str | None = setting(None, "Name of the run; null: that of the run directory.")
    tags: list[str] = setting([], "Tags of the run.")
    mode: str = one_of(
        "auto",
        "online",
        "offline",
        "disabled",
        doc="auto: WANDB_MODE if set, else online when logged in, else offline.",
    )


@dataclass(frozen=True)
class TensorboardConfig(TrackerConfig):
    """TensorBoard event files in the run directory; needs ``pip install tensorboard``."""

    name: str = option("tensorboard")


@dataclass(frozen=True)
class TelemetryConfig(CheckedRecord):
    """Samples of what precision costs a run, and of how long its ranks are busy. See docs/precision/telemetry.md."""

    precision_every: int = at_least(
        100, 0, "Steps from one sampled step, in which every gradient and update is measured, to the next; 0: none."
    )
    activations: list[str] = setting(
        [], "Name patterns of modules whose outputs are counted in sampled steps too, such as ['blocks.*.attn']."
    )
    advice: str | None = setting(
        None,
        "JSON of dtrain probe: warn when a sampled step leaves the range in which its advice was given.",
        is_path=True,
    )
    busy_every: int = at_least(
        20,
        0,
        "Steps over which the ranks compare how long each was busy; one slower than 1.2 times the median is named; "
        "0: never. On a GPU, which times every fifth step, a small number such as 1 compares nothing.",
    )

    def _check(self) -> None:
        for name in ("activations", "advice"):
            if getattr(self, name) and not self.precision_every:
                raise ConfigError(f"{self._entry(name)} needs sampled steps; set {self._key('precision_every')}=100")


@dataclass(frozen=True)
class CheckpointConfig(CheckedRecord):
    """Saving and retention of checkpoints. See docs/run/checkpoints.md."""

    asynchronous: bool = setting(
        True, "Continue training while a checkpoint is written; takes host memory for one more copy of the shard."
    )
    when_busy: str = one_of(
        "wait", "skip", doc="If a checkpoint is due while another is being written: wait for it, or skip the new one."
    )
    keep_last: int = at_least(2, 1, "Number of newest checkpoints to keep.")
    keep_every: int = at_least(0, 0, "Keep each checkpoint whose step is a multiple of this; 0: none.")
    keep_best: int = at_least(
        0,
        0,
        "Number of checkpoints to keep for their validation loss; above 0, a validation precedes each periodic save.",
    )
    save_at_end: bool = setting(True, "Save after the last step.")

    def _check(self) -> None:
        if self.when_busy == "skip" and not self.asynchronous:
            asynchronous = self._key("asynchronous")
            raise ConfigError(
                f"{self._entry('when_busy')} works only with {asynchronous}=true: a synchronous save has ended before "
                f"the next one is due; remove it, or set {asynchronous}=true"
            )


@dataclass(frozen=True)
class LaunchConfig(CheckedRecord):
    """Processes, device, threads and timeouts on this machine."""

    num_processes: int | str | None = at_least(
        None, 1, "Ranks to start on this machine; auto: one per GPU; null: none, this process is the rank."
    )
    device: str = one_of("auto", "cpu", "cuda", doc="Device of each rank; auto: a GPU if there is one.")
    threads_per_rank: int | None = at_least(
        None, 1, "PyTorch threads of a rank; null: cores / ranks on this host, or 1 on a CPU if reproducible."
    )
    timeout_s: float = at_least(600.0, 1.0, "Seconds after which an unfinished collective ends the run.")
    shared_memory: bool = setting(
        True, "CPU ranks of one host read each other's buffers; false, or if they cannot: sockets, with the same bits."
    )

    def _check(self) -> None:
        if isinstance(self.num_processes, str) and self.num_processes != "auto":
            raise ConfigError(
                f"{self._entry('num_processes')} must be a number, auto (one a GPU), or null (this process)"
            )


@dataclass(frozen=True)
class SuperviseConfig(CheckedRecord):
    """Limits after which a run that hangs is ended, and restarts without progress. See docs/run/supervision.md."""

    enabled: bool = setting(True, "Watch the ranks of each host from another process; off in a debugger.")
    limit_s: float = above(
        60.0, 0.0, "Seconds without progress after which a rank hangs; 10 x the median of the phase if that is more."
    )
    start_s: float = above(600.0, 0.0, "The same until the end of the first step, in a compilation and at the end.")
    save_s: float = above(600.0, 0.0, "The same while a checkpoint is saved or loaded.")
    restarts: int = at_least(
        3, 0, "Restarts after a failure without a newer checkpoint, after which the run refuses to start; 0: no limit."
    )


@dataclass(frozen=True)
class RunConfig(CheckedRecord):
    """One training run, resolved and checked; ``config.yaml`` in the run directory holds it."""

    run_dir: str | None = setting(
        None, "Directory of everything the run writes; null: `runs/<date>_<time>`.", is_path=True
    )
    seed: int = at_least(0, 0, "Seed of weights, sample order and dropout.")
    resume: str = setting(
        "auto",
        "auto: continue from the newest checkpoint of run_dir that verifies; none: do not; or a checkpoint's path.",
        is_path=True,
    )
    report: bool = setting(
        True, "Compare the memory with its plan and write report.html at the end of the run, which takes some seconds."
    )
    train: TrainConfig = group(TrainConfig)
    engine: EngineConfig = group(Native, EngineConfig)
    precision: PrecisionConfig = group(PrecisionConfig)
    model: ModelConfig = group(ModelConfig)
    data: DataConfig = group(StdlibDataConfig, DataConfig)
    optim: OptimKeys = group(OptimConfig, Optimizer)
    ema: EmaConfig = group(EmaConfig)
    schedule: ScheduleConfig = group(Cosine, ScheduleConfig)
    tracker: TrackerConfig = group(TrackerConfig)
    telemetry: TelemetryConfig = group(TelemetryConfig)
    checkpoint: CheckpointConfig = group(CheckpointConfig)
    audit: Audit = group(Audit)
    launch: LaunchConfig = group(LaunchConfig)
    supervise: SuperviseConfig = group(SuperviseConfig)

    def _check(self) -> None:
        if self.run_dir == "":
            raise ConfigError("run_dir is empty; name a folder, or leave it null for runs/<date>_<time>")
        if self.resume == "":
            raise ConfigError("resume is empty; it is auto, none, or the path of a checkpoint")

    @property
    def batch_growth(self) -> BatchGrowth:
        """Sizes of the batch of each attempted step."""
        return BatchGrowth.of(self.train.global_batch_size, self.train.seq_len, self.targets_per_sample)

    @property
    def targets_per_sample(self) -> int:
        """Targets of a sample that may count in the loss: its tokens, else one."""
        return self.model.max_seq_len if self.data.is_language else 1

    @property
    def switch_step(self) -> int:
        """Steps after which the run leaves FP8 (``precision.float8.finish_in``); all of them if it never does."""
        float8 = self.precision.float8
        return self.train.steps - (float8.finish_steps if float8.finish_in != "none" else 0)

    def at(self, step: int) -> RunConfig:
        """Returns the run in the precision of the step that follows ``step`` steps; itself before ``switch_step``."""
        if self.precision.float8.finish_in == "none" or step < self.switch_step:
            return self
        return replace(self, precision=self.precision.finish())

    @property
    def parts(self) -> tuple[RunConfig, ...]:
        """The run in each of its precisions, in their order."""
        return (self,) if self.switch_step == self.train.steps else (self, self.at(self.switch_step))

    def at_largest_batch(self) -> RunConfig:
        """Returns the run with the largest batch and the longest rows in every step."""
        largest = self.batch_growth.largest
        sizes: dict[str, Any] = {"global_batch_size": largest.global_batch_size, "seq_len": largest.seq_len}
        if largest.seq_len == self.targets_per_sample:
            sizes["seq_len"] = None
        return replace(self, train=replace(self.train, **sizes))


GROUP_OPTIONS: dict[str, dict[str, type[Any]]] = {
    "engine": {**ENGINES},
    "data": {
        "stdlib": StdlibDataConfig,
        "text": TextDataConfig,
        "tokens": TokensDataConfig,
        "chat": ChatDataConfig,
        "images": ImagesDataConfig,
        "glyphs": GlyphsDataConfig,
        "arrays": ArraysDataConfig,
        "friedman": FriedmanDataConfig,
    },
    "optim": {**OPTIM_KEYS},
    "schedule": {"cosine": Cosine, "linear": Linear, "constant": Constant, "wsd": WSD},
    "tracker": {"none": TrackerConfig, "wandb": WandbConfig, "tensorboard": TensorboardConfig},
}
"""Groups whose options have different keys: option name -> its schema. All other groups have one schema."""


def unit_of(data: Any) -> str:
    """Returns what counts in the loss with ``data.name=DATA``: ``samples``, or ``tokens`` also if it is not known."""
    options = GROUP_OPTIONS["data"].get(str(data), DataConfig)
    return "tokens" if options.is_language else "samples"
