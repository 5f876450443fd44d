"""Arguments of Trainer that an engine cannot honor: each is refused by name, before training."""

from __future__ import annotations

import json
from typing import Any

from dtrain.distributed.startup.setup import read_launch_env
from dtrain.errors import ConfigError
from dtrain.local_paths import require_local

_REFUSED = {
    "deepspeed": "choose the library below by dtrain={'engine': 'deepspeed'}",
    "fsdp": "choose the library below by dtrain={'engine': 'fsdp2'}, or native with zero_stage=3",
    "parallelism_config": "an engine is data-parallel; remove it",
    "torch_compile": "compile the blocks: dtrain={'blocks': dtrain.Blocks(compile='blocks')}",
    "auto_find_batch_size": "it repeats training on an engine in an unknown state; set per_device_train_batch_size",
    "bf16_full_eval": "evaluation has the precision of training already; remove it",
    "fp16_full_eval": "evaluation has the precision of training already; remove it",
    "save_on_each_node": "all ranks write one checkpoint to one file system; remove it",
}
"""Remedies, by argument."""

_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
"""Values of ``optim`` whose update is elementwise and whose states an engine keeps."""


OLDEST = (5, 23)
"""Oldest version of transformers with the methods of Trainer that the mixin follows."""


def check_version(version: str) -> None:
    """Raises ``ConfigError`` if ``version`` of transformers is older than ``OLDEST``."""
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise ConfigError(
            f"Trainer with dtrain needs transformers {'.'.join(map(str, OLDEST))} or newer, and {version} is "
            f"installed; pip install -U transformers, or use dtrain.integrations.accelerate in a loop of your own"
        )


def check_arguments(args: Any) -> None:
    """Raises ``ConfigError`` for a ``TrainingArguments`` that no engine can honor."""
    require_local(args.output_dir or "", "TrainingArguments(output_dir)")
    for name, instead in _REFUSED.items():
        value = getattr(args, name, None)
        if value:
            raise ConfigError(f"TrainingArguments({name}={value!r}) is not supported with dtrain: {instead}")
    if args.enable_jit_checkpoint and args.world_size > 1:
        raise ConfigError(
            f"TrainingArguments(enable_jit_checkpoint=True) is not supported with dtrain on {args.world_size} ranks: "
            f"each would save at a step of its own; save often by save_steps instead"
        )
    if (args.activation_checkpointing_kwargs or {}).get("use_reentrant"):
        raise ConfigError(
            "TrainingArguments(activation_checkpointing_kwargs={'use_reentrant': True}) is not supported with dtrain: "
            "gradients inside a reentrant checkpoint arrive at the wrong time; use {'use_reentrant': False}"
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"one process sees {args.n_gpu} GPUs, which Trainer would feed by DataParallel; start one process a GPU: "
            f"torchrun --standalone --nproc_per_node={args.n_gpu} your_script.py"
        )
    started = read_launch_env().world_size
    if started != args.world_size:
        raise ConfigError(
            f"the launcher has started {started} ranks, but TrainingArguments counts {args.world_size}; start them by "
            f"torchrun, and on ranks without a GPU pass use_cpu=True"
        )


def check_model(model: Any) -> None:
    """Raises ``ConfigError`` for a model that transformers has sharded, split over devices, or quantized."""
    if getattr(model, "is_distributed_loading_by_transformers", False) or (getattr(model, "tp_size", None) or 1) > 1:
        raise ConfigError(
            "the model was sharded by from_pretrained(distributed_config=...) or tp_plan=...; load it whole, and shard "
            "it by dtrain={'engine': dtrain.Native(zero_stage=3)}"
        )
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        raise ConfigError(
            "the model is split over devices by device_map; load it whole, and shard it by "
            "dtrain={'engine': dtrain.Native(zero_stage=3)}"
        )
    if getattr(model, "is_quantized", False):
        raise ConfigError(
            "the model's weights are quantized, and training starts from the unrounded ones; load it without a "
            "quantization_config"
        )


def check_optimizer(args: Any) -> None:
    """Raises ``ConfigError`` if the optimizer that ``args.optim`` names has an update that no engine can run."""
    name = getattr(args.optim, "value", args.optim)
    if name not in _OPTIMIZERS:
        raise ConfigError(
            f"TrainingArguments(optim='{name}') is not supported with dtrain, whose update of the sharded masters is "
            f"elementwise and in FP32; use {', '.join(_OPTIMIZERS)}; an optimizer of torch, by optimizers=; or one of "
            f"dtrain's, by the default optim and dtrain={{'optimizer': dtrain.AdamWBF16()}}"
        )


def scheduler_text(scheduler: Any) -> str:
    """Returns the state of ``scheduler`` as JSON, or raises ``ConfigError`` if it is more than numbers and text."""
    state = scheduler.state_dict()
    try:
        text = json.dumps(state)
        if json.loads(text) == state:
            return text
    except TypeError:
        pass
    raise ConfigError(
        f"the state of {type(scheduler).__name__} is more than numbers, text and lists, so no checkpoint can hold it; "
        f"use one of lr_scheduler_type, a LambdaLR, or save_strategy='no'"
    )
