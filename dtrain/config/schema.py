"""The typed schema of a run: one frozen dataclass per Hydra group.

YAML under ``conf/`` only picks and overrides these defaults. Constraints on one field are in its metadata
(``config.fields``); constraints between fields are in ``cli.checks``. Nothing here imports torch, so that
``dtrain train --help`` answers at once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from dtrain.config.fields import above, at_least, between, group, one_of, setting
from dtrain.config.precision import PrecisionConfig


@dataclass(frozen=True)
class TrainConfig:
    """Length of the run, batch sizes, and how often it logs, validates and saves."""

    steps: int = at_least(200, 1, "Steps to attempt; skipped steps count.")
    micro_batch_size: int = at_least(8, 1, "Sequences in one forward on one rank.")
    global_batch_size: int = at_least(
        16, 1, "Sequences in one step over all ranks; the number of accumulated micro-batches follows from it."
    )
    log_every: int = at_least(10, 1, "Steps from one logged line to the next.")
    eval_every: int = at_least(100, 0, "Steps from one validation to the next; 0: only at the end.")
    eval_batches: int = at_least(16, 1, "Micro-batches of a validation, over all ranks.")
    save_every: int = at_least(100, 0, "Steps from one checkpoint to the next; 0: only at the end.")
    sample_tokens: int = at_least(160, 0, "Length of the text sample written at the end; 0: none.")


@dataclass(frozen=True)
class EngineConfig:
    """Engine that runs the training step. `dtrain doctor engines` compares what they can do."""

    name: str = "native"
    zero_stage: int = between(
        2, 0, 3, "What is sharded: 0 nothing, 1 masters and moments, 2 also gradients, 3 also weights."
    )
    reproducible: bool = setting(False, "Compute equal bits at any number of ranks and any stage.")
    reduce_dtype: str = one_of(
        "auto",
        "fp32",
        "bf16",
        "fp16",
        doc="Dtype of gradients during reduction; sums are FP32. auto: as they are computed, or FP32 if a rank sums "
        "its micro-batches first; engines other than native use FP32.",
    )
    max_consecutive_skips: int = at_least(50, 1, "Skipped steps in a row after which the run ends with a diagnosis.")


@dataclass(frozen=True)
class NativeEngineConfig(EngineConfig):
    """dtrain's own engine: sharded FP32 masters, gradients sent in the replica dtype, one vote per step."""

    name: str = "native"
    grad_reduction: str = one_of(
        "auto",
        "all_reduce",
        "reduce_scatter",
        doc="At stage 1, the collective that sums gradients; auto: reduce_scatter.",
    )
    reshard_after_forward: bool = setting(
        True, "At stage 3, free a group's weights after its forward; false: only after its backward."
    )
    prefetch: int = at_least(1, 0, "At stage 3, number of groups unsharded ahead of their use.")
    keep_gathered: list[str] = setting(
        [], "At stage 3, name patterns of modules or parameters that stay unsharded throughout a step."
    )


@dataclass(frozen=True)
class FSDP2EngineConfig(EngineConfig):
    """PyTorch's ``fully_shard`` with dtrain's vote; stage 2 keeps unsharded weights until backward, 3 frees them."""

    name: str = "fsdp2"


@dataclass(frozen=True)
class DeepSpeedEngineConfig(EngineConfig):
    """DeepSpeed's ZeRO with dtrain's vote."""

    name: str = "deepspeed"
    offload: str = one_of("none", "cpu", doc="Memory that holds masters and moments: the rank's device, or the host's.")


@dataclass(frozen=True)
class DDPEngineConfig(EngineConfig):
    """PyTorch's DistributedDataParallel: FP32 weights on every rank, cast by autocast."""

    name: str = "ddp"
    zero_stage: int = between(0, 0, 3, EngineConfig.__dataclass_fields__["zero_stage"].metadata["doc"])


DEFAULT_FACTORY = "dtrain.models.transformer:build"
GPT2_FACTORY = "dtrain.models.gpt2:build"
VOCAB_MULTIPLE = 64
"""Multiple to which the vocabulary of the built-in models is padded."""
FACTORY_FORM = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""Pattern of ``package.module:function``."""


@dataclass(frozen=True)
class ModelConfig:
    """Model to train: a transformer, GPT-2, or the module that your own factory returns. See docs/models.md."""

    name: str = "tiny"
    factory: str = setting(
        DEFAULT_FACTORY, "Function that builds the model: package.module:function, called with (config, vocab_size)."
    )
    num_layers: int = at_least(4, 1, "Transformer blocks.")
    hidden_dim: int = at_least(256, 1, "Width of the residual stream.")
    num_heads: int = at_least(4, 1, "Attention heads of a block.")
    num_kv_heads: int | None = at_least(None, 1, "Key-value heads of a block; null: as many as num_heads.")
    ffn_dim: int | None = at_least(
        None, 1, "Width of the feed-forward; null: 8/3 x hidden_dim, rounded up to 64, and 4 x hidden_dim in GPT-2."
    )
    max_seq_len: int = at_least(256, 1, "Tokens in a sequence.")
    vocab_size: int | None = at_least(None, 1, "Vocabulary; null: the data's, otherwise at least that.")
    dropout: float = between(0.0, 0.0, 1.0, "Dropout probability.")
    tie_embeddings: bool = setting(True, "Share one weight between the embedding and the output layer.")
    rope_theta: float = at_least(10000.0, 1.0, "Base of the rotary position embedding.")
    norm_eps: float = at_least(1e-5, 0.0, "Term added to the variance in norms.")
    args: dict[str, Any] = setting({}, "Free keys for a factory of your own.")


@dataclass(frozen=True)
class DataConfig:
    """Text to train on, as byte tokens. See docs/data.md."""

    name: str = "stdlib"
    validation_percent: float = between(
        5.0, 0.0, 50.0, "Percentage of files held out for validation, by a hash of the relative path."
    )


@dataclass(frozen=True)
class StdlibDataConfig(DataConfig):
    """Source text of the running Python's standard library: real text, no download."""

    name: str = "stdlib"


@dataclass(frozen=True)
class TextDataConfig(DataConfig):
    """Any text files."""

    name: str = "text"
    files: str = setting("", "Glob of the files, such as '/data/**/*.txt'; required.")


@dataclass(frozen=True)
class OptimConfig:
    """AdamW on the FP32 masters (Loshchilov and Hutter, 2019)."""

    name: str = one_of("adamw", doc="")
    lr: float = at_least(1e-3, 0.0, "Peak learning rate.")
    betas: tuple[float, float] = setting((0.9, 0.95), "Decay rates of the two moments, each in [0, 1).")
    eps: float = at_least(1e-8, 0.0, "Term added to the denominator.")
    weight_decay: float = at_least(0.1, 0.0, "Decoupled weight decay; norms and biases are not decayed.")
    max_grad_norm: float | None = above(1.0, 0.0, "Norm to which the gradient is clipped; null: no clipping.")
    compile: bool | str = one_of(
        "auto",
        True,
        False,
        doc="Compile the update (on a GPU norm and vote too), which takes seconds; auto: on a GPU with a compiler.",
    )


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate as a function of applied steps, over train.steps."""

    name: str = "cosine"
    warmup_steps: int | None = at_least(
        None, 0, "Steps of linear warm-up; null: a tenth of train.steps, rounded down, at most 20."
    )

    def resolve_warmup_steps(self, total_steps: int) -> int:
        """Warm-up steps of a run of ``total_steps``.

        null stays null in ``config.yaml``: a run resumed with other ``train.steps`` follows the new number, as the
        rest of its schedule does.
        """
        return min(20, total_steps // 10) if self.warmup_steps is None else self.warmup_steps


_MIN_RATIO = "Share of the peak learning rate that is left at the end."


@dataclass(frozen=True)
class CosineConfig(ScheduleConfig):
    """Linear warm-up, then half a cosine down to ``min_ratio`` of the peak."""

    name: str = "cosine"
    min_ratio: float = between(0.1, 0.0, 1.0, _MIN_RATIO)


@dataclass(frozen=True)
class LinearConfig(ScheduleConfig):
    """Linear warm-up, then a straight line down to ``min_ratio`` of the peak."""

    name: str = "linear"
    min_ratio: float = between(0.1, 0.0, 1.0, _MIN_RATIO)


@dataclass(frozen=True)
class ConstantConfig(ScheduleConfig):
    """Linear warm-up, then the peak until the end."""

    name: str = "constant"


@dataclass(frozen=True)
class WSDConfig(ScheduleConfig):
    """Warm-up, stable, decay: the last ``decay_steps`` fall in a straight line to ``min_ratio`` of the peak."""

    name: str = "wsd"
    decay_steps: int = at_least(40, 1, "Steps of the decay at the end.")
    min_ratio: float = between(0.0, 0.0, 1.0, _MIN_RATIO)


@dataclass(frozen=True)
class TrackerConfig:
    """Service that gets the metrics too; ``metrics.jsonl`` is always written."""

    name: str = "none"


@dataclass(frozen=True)
class WandbConfig(TrackerConfig):
    """Weights & Biases: online when logged in, offline otherwise, never a prompt; rank 0 only."""

    name: str = "wandb"
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

    name: str = "tensorboard"


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and retention of checkpoints. See docs/checkpoints.md."""

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


@dataclass(frozen=True)
class LaunchConfig:
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


@dataclass(frozen=True)
class RunConfig:
    """One training run, resolved and checked; ``config.yaml`` in the run directory holds it."""

    run_dir: str | None = setting(None, "Directory of everything the run writes; null: `runs/<date>_<time>`.")
    seed: int = at_least(0, 0, "Seed of weights, sample order and dropout.")
    resume: str = setting(
        "auto",
        "auto: continue from the newest checkpoint of run_dir that verifies; none: do not; or a checkpoint's path.",
    )
    train: TrainConfig = group(TrainConfig)
    engine: EngineConfig = group(NativeEngineConfig, EngineConfig.__doc__ or "")
    precision: PrecisionConfig = group(PrecisionConfig)
    model: ModelConfig = group(ModelConfig)
    data: DataConfig = group(StdlibDataConfig, DataConfig.__doc__ or "")
    optim: OptimConfig = group(OptimConfig)
    schedule: ScheduleConfig = group(CosineConfig, ScheduleConfig.__doc__ or "")
    tracker: TrackerConfig = group(TrackerConfig)
    checkpoint: CheckpointConfig = group(CheckpointConfig)
    launch: LaunchConfig = group(LaunchConfig)


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
