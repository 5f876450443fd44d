"""Checks the arguments of ``dtrain.integrations.accelerate.Accelerator``, before a process group exists."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import accelerate
import torch
from accelerate.utils import (
    AORecipeKwargs,
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    FP8RecipeKwargs,
    GradScalerKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
)

from dtrain.config.engines import ENGINES, EngineConfig
from dtrain.engine.settings import engine_record
from dtrain.errors import ConfigError, nearest
from dtrain.precision.policy import PrecisionPolicy

ENGINE_OPTIONS = (
    *("optimizer", "loss_scale", "max_grad_norm", "ema_decay", "missing_grad", "audit", "blocks", "seed"),
    "frozen_source",
)
"""Arguments of ``dtrain.initialize`` that the Accelerator takes beside ``engine`` and ``precision``."""

_NATIVE = "engine=dtrain.Native(zero_stage=3) shards parameters, gradients and states"
_BACKENDS = {
    "deepspeed_plugin": "engine=dtrain.DeepSpeed(zero_stage=2) trains with DeepSpeed",
    "deepspeed_plugins": "engine=dtrain.DeepSpeed(zero_stage=2) trains with DeepSpeed",
    "fsdp_plugin": f"engine=dtrain.FSDP2() trains with FSDP2, and {_NATIVE}",
    "torch_tp_plugin": f"dtrain has no tensor parallelism; {_NATIVE}",
    "megatron_lm_plugin": f"dtrain does not train with Megatron-LM; {_NATIVE}",
    "parallelism_config": f"dtrain's engines are data parallel; {_NATIVE}",
    "dynamo_plugin": "blocks=dtrain.Blocks(compile='blocks') compiles the model's blocks",
}
_VARIABLES = {
    "ACCELERATE_USE_DEEPSPEED": _BACKENDS["deepspeed_plugin"],
    "ACCELERATE_USE_FSDP": _BACKENDS["fsdp_plugin"],
    "ACCELERATE_USE_MEGATRON_LM": _BACKENDS["megatron_lm_plugin"],
    "ACCELERATE_USE_PARALLELISM_CONFIG": _BACKENDS["parallelism_config"],
}
_FLOAT8 = "precision='fp8' chooses the products; dtrain.PrecisionPolicy.named('fp8', float8=...) takes options"
_HANDLERS = {
    GradScalerKwargs: "loss_scale=dtrain.LossScale(...) sets the loss scale",
    AutocastKwargs: "precision=... decides in which dtype each module computes",
    FP8RecipeKwargs: _FLOAT8,
    AORecipeKwargs: _FLOAT8,
    TERecipeKwargs: _FLOAT8,
    MSAMPRecipeKwargs: _FLOAT8,
}
_OF_ACCELERATE = {"no": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}
_TRUE = ("1", "true", "yes", "on", "y", "t")


def check_options(options: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` for arguments and environment variables of accelerate that choose another backend."""
    for name, instead in _BACKENDS.items():
        if options.get(name) is not None:
            raise ConfigError(f"Accelerator({name}=...) chooses another backend than dtrain; leave it out: {instead}")
    for name, instead in _VARIABLES.items():
        if os.environ.get(name, "").lower() in _TRUE:
            raise ConfigError(f"{name}={os.environ[name]} chooses another backend than dtrain; unset it: {instead}")
    backend = options.get("dynamo_backend") or os.environ.get("ACCELERATE_DYNAMO_BACKEND")
    if backend is not None and str(getattr(backend, "value", backend)).lower() != "no":
        raise ConfigError(f"dynamo_backend={backend}: leave it out: {_BACKENDS['dynamo_plugin']}")
    for handler in options.get("kwargs_handlers") or ():
        for kind, instead in _HANDLERS.items():
            if isinstance(handler, kind):
                raise ConfigError(f"kwargs_handlers has {type(handler).__name__}; leave it out: {instead}")
        if isinstance(handler, DistributedDataParallelKwargs) and handler.comm_hook != DDPCommunicationHookType.NO:
            raise ConfigError(
                f"DistributedDataParallelKwargs(comm_hook={handler.comm_hook}): no model is wrapped in DDP; leave it "
                f"out: engine=dtrain.Native(reduce_dtype='bf16') sends gradients in BF16"
            )


def resolve_precision(mixed_precision: str | None, precision: Any) -> PrecisionPolicy:
    """Returns the policy of ``precision``, or else that of accelerate's ``mixed_precision`` or its variable.

    Raises:
        ConfigError: the two contradict each other, or one of them is unknown.
    """
    if mixed_precision is not None and (name := str(mixed_precision).lower()) not in _OF_ACCELERATE:
        raise ConfigError(f"mixed_precision={mixed_precision!r} is not one of {', '.join(_OF_ACCELERATE)}")
    if precision is None:
        given = mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION") or "no"
        return resolve_precision(given, _OF_ACCELERATE.get(str(given).lower(), "fp32"))
    policy = PrecisionPolicy.of(precision)
    if mixed_precision is not None and name != mixed_precision_of(policy):
        raise ConfigError(
            f"mixed_precision={mixed_precision!r} contradicts precision={policy.name}; give one of the two"
        )
    return policy


def mixed_precision_of(policy: PrecisionPolicy) -> str:
    """Returns accelerate's name of the policy; ``auto``, which the device decides, has none of accelerate's."""
    names = {value: key for key, value in _OF_ACCELERATE.items()} | {"tf32": "no"}
    return names.get(policy.name, policy.name)


def take_engine(engine: Any, options: dict[str, Any]) -> EngineConfig:
    """Returns the record of ``engine`` with those of ``options`` that are its fields, which are removed there.

    Raises:
        ConfigError: it is neither a name nor a record of an engine; fields beside a record; a value that is not
            permitted; or an unknown option.
    """
    if not isinstance(engine, (str, EngineConfig)):
        raise ConfigError(
            f"engine={engine!r} is not a record such as dtrain.Native(zero_stage=2), or the name of an engine"
        )
    names = {item.name for record in ENGINES.values() for item in fields(record)} - {"name"}
    record = engine_record(engine, {name: options.pop(name) for name in list(options) if name in names})
    known = [*inspect.signature(accelerate.Accelerator.__init__).parameters][1:]
    for name in options:
        if name not in (*known, *ENGINE_OPTIONS):
            raise ConfigError(f"Accelerator({name}=...) is unknown{nearest(name, [*known, *ENGINE_OPTIONS, *names])}")
    return record


def autocast_dtype(policy: PrecisionPolicy) -> torch.dtype | None:
    """Returns the dtype of autocast for a model without an engine; None: it computes in FP32."""
    return None if policy.compute_dtype == torch.float32 else policy.compute_dtype
