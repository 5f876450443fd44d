"""The arguments of ``dtrain.initialize``, each checked like a key of the configuration, with one clear error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from dtrain.checkpoint.frozen_source import FrozenSource
from dtrain.config.audit import Audit
from dtrain.config.blocks import Blocks
from dtrain.config.engines import ENGINES, EngineConfig, engines_with, settings_of
from dtrain.config.fields import check_field, in_keys, shown
from dtrain.config.optim import OPTIM_KEYS, OPTIMIZERS, AdamW, EmaConfig, Optimizer
from dtrain.config.records import check_records
from dtrain.config.schedule import AnySchedule, Constant, ScheduleConfig
from dtrain.config.schema import RunConfig
from dtrain.distributed.communicator import Communicator
from dtrain.engine.request import StepOptions, is_managed
from dtrain.errors import ConfigError, ModelError, nearest
from dtrain.optim.torch_schedule import TorchSchedule
from dtrain.parameters.groups import check_overlaps
from dtrain.precision.policy import PrecisionPolicy, check_trainable

_OTHERS = (
    *("model", "optimizer", "schedule", "engine", "precision", "loss_scale", "max_grad_norm", "ema_decay"),
    *("missing_grad", "audit", "blocks", "seed", "comm", "frozen_source"),
)


def engine_record(engine: str | EngineConfig, settings: Mapping[str, Any]) -> EngineConfig:
    """Returns the record of ``engine`` with ``settings``, the arguments that are shorthand for its fields.

    Raises:
        ConfigError: an unknown engine or setting, one that the record refuses, or one that it has with another value.
    """
    if isinstance(engine, str):
        if engine not in ENGINES:
            raise ConfigError(f"engine '{engine}' is not one of {', '.join(ENGINES)}{nearest(engine, ENGINES)}")
        record = ENGINES[engine]()
    elif type(engine) in ENGINES.values():
        record = engine
    else:
        raise ConfigError(
            f"engine={shown(engine)} is not one of {', '.join(ENGINES)}, or a record such as "
            f"dtrain.Native(zero_stage=3)"
        )
    kind = type(record)
    for name in settings:
        if name not in settings_of(kind):
            raise _unknown(name, record)
    try:
        changed = replace(record, **settings)
    except ConfigError as error:
        raise in_keys(error, kind, "") from None
    for name, value in settings.items():
        own = getattr(record, name)
        if record is engine and own != getattr(changed, name):
            raise ConfigError(
                f"{name}={shown(value)} beside engine={kind.__name__}({name}={shown(own)}); set it in the record only"
            )
    return changed


def _unknown(name: str, record: EngineConfig) -> ConfigError:
    if name == "groups":
        return ConfigError(
            "groups belong to the optimizer: optimizer=dtrain.AdamW(groups={'*.embed*': {'lr_factor': 0.1}}); name "
            "patterns of modules that are each sharded as a unit are sharding_units"
        )
    if owners := engines_with(name):
        return ConfigError(f"engine={record.name} has no {name}; it is a setting of engine={' and '.join(owners)}")
    return ConfigError(
        f"dtrain.initialize has no argument {name}{nearest(name, (*_OTHERS, *settings_of(type(record))))}"
    )


def check_precision(options: StepOptions, policy: PrecisionPolicy) -> None:
    """Raises ``ConfigError`` if the engine does not support the precision, one of its rules, or another record."""
    arguments = {"rules": "precision.rules", "compile": "optimizer.compile"}  # else the argument's own name
    arguments |= {"replay_every": "audit.replay_every", "compile_blocks": "Blocks.compile"}
    rules = [name for _, name in policy.rules]
    check_records(
        *(options.engine, options.optimizer, options.audit, options.blocks, policy.name, rules),
        format_key=lambda key: arguments.get(key, key),
    )


def optimizer_record(optimizer: Optimizer | None) -> Optimizer:
    """Returns the hyper-parameters, the default ones for None; raises ``ConfigError`` for an optimizer of torch."""
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        names = ", ".join(record.__name__ for record in OPTIMIZERS.values())
        raise ConfigError(
            f"optimizer={shown(optimizer)} is not an optimizer of dtrain ({names}); give the hyper-parameters as a "
            f"record, such as dtrain.AdamW(lr=3e-4, weight_decay=0.1), because dtrain updates the sharded FP32 masters "
            f"itself; for another optimizer of torch: dtrain.TorchOptimizer(torch.optim.RAdam, lr=3e-4)"
        )
    optimizer = optimizer or AdamW()
    scheduled = {}
    for pattern, changes in optimizer.groups.items():
        if "schedule" in changes:
            try:
                schedule = schedule_record(changes["schedule"], optimizer.lr)
            except ConfigError as error:
                raise ConfigError(f"{type(optimizer).__name__}.groups, '{pattern}': {error}") from None
            scheduled[pattern] = {**changes, "schedule": schedule}
    return replace(optimizer, groups={**optimizer.groups, **scheduled}) if scheduled else optimizer


def schedule_record(schedule: AnySchedule | None, lr: float) -> AnySchedule:
    """Returns the schedule without nulls, for the peak ``lr``; raises ``ConfigError`` for something else."""
    if schedule is None:
        return Constant().over()
    if isinstance(schedule, LRScheduler) or (isinstance(schedule, type) and issubclass(schedule, LRScheduler)):
        name = (schedule if isinstance(schedule, type) else type(schedule)).__name__
        raise ConfigError(
            f"schedule={shown(schedule)} is a scheduler of torch, which works on an optimizer of torch; write "
            f"schedule=dtrain.TorchSchedule(torch.optim.lr_scheduler.{name}, ...) with its options"
        )
    if isinstance(schedule, type) or not callable(getattr(schedule, "factor", None)):
        if callable(schedule) and not isinstance(schedule, type):
            raise ConfigError(
                "schedule is a function; write schedule=dtrain.Schedule(function), if it returns the fraction of the "
                "peak learning rate after a number of applied steps"
            )
        raise ConfigError(
            f"schedule={shown(schedule)} is not a schedule of dtrain, such as dtrain.Cosine(warmup_steps=100, "
            f"total_steps=10_000), or dtrain.Schedule(lambda step: 1 / (step + 1) ** 0.5), or a frozen dataclass of "
            f"your own with a method factor(step)"
        )
    if not is_dataclass(schedule):
        raise ConfigError(
            f"the schedule is {type(schedule).__name__}, whose values the ranks cannot compare; make it a frozen "
            f"dataclass, its numbers as fields, with a method factor(step), or give dtrain.Schedule(its factor)"
        )
    if isinstance(schedule, TorchSchedule):
        return schedule.with_base_lr(lr)
    return schedule.over() if isinstance(schedule, ScheduleConfig) else schedule


def checked_ema_decay(decay: float | None) -> float | None:
    """Returns the decay of the moving average, or raises ``ConfigError``."""
    try:
        return EmaConfig(decay).decay
    except ConfigError as error:
        raise ConfigError(str(error).replace("EmaConfig.decay", "ema_decay")) from None


def checked_threshold(max_grad_norm: float | None) -> float | None:
    """Returns the threshold of clipping, or raises ``ConfigError``."""
    try:
        return check_field(OPTIM_KEYS["adamw"], "max_grad_norm", max_grad_norm, "max_grad_norm")  # type: ignore[no-any-return]
    except ConfigError as error:
        raise ConfigError(f"{error}; None clips nothing") from None


def checked_missing_grad(missing_grad: str) -> str:
    """Returns what a missing gradient means, or raises ``ConfigError``."""
    return check_field(OPTIM_KEYS["adamw"], "missing_grad", missing_grad, "missing_grad")  # type: ignore[no-any-return]


def audit_record(audit: Audit | int | None) -> Audit:
    """Returns the record of audits: the default one for None; a number is its ``every``."""
    if audit is None or isinstance(audit, Audit):
        return audit or Audit()
    return Audit(check_field(Audit, "every", audit, "audit"))


def blocks_record(blocks: Blocks | None) -> Blocks:
    """Returns the record of blocks, the default one for None; raises ``ConfigError`` for something else."""
    if blocks is not None and not isinstance(blocks, Blocks):
        raise ConfigError(
            f"blocks={shown(blocks)} is not a record such as dtrain.Blocks(recompute='selective', compile='blocks')"
        )
    return blocks or Blocks()


def check_others(seed: int | None, comm: Communicator | None, frozen_source: FrozenSource | None) -> None:
    """Raises ``ConfigError`` for a seed, a communicator or a source of frozen weights of another type."""
    if seed is not None:
        check_field(RunConfig, "seed", seed, "seed")
        if seed >= 2**64:
            raise ConfigError(f"seed={seed} is too large; it must be below 2**64, as torch's generators need")
    if comm is not None and (isinstance(comm, type) or not callable(getattr(comm, "gather_rows", None))):
        raise ConfigError(
            f"comm={shown(comm)} is not a dtrain communicator; omit it to train with the process group that exists"
        )
    if frozen_source is not None and not isinstance(frozen_source, FrozenSource):
        raise ConfigError(f"frozen_source={shown(frozen_source)} is not a dtrain.FrozenSource(folder)")


def check_model(model: nn.Module) -> None:
    """Raises ``ModelError`` for what is no module, is under an engine, or cannot be trained.

    It is called before the model moves to its device, which would untie two parameters over one storage.
    """
    if not isinstance(model, nn.Module):
        call = "; call it: the model is an instance" if isinstance(model, type) else ""
        raise ModelError(f"model={shown(model)} is not a torch.nn.Module{call}")
    if is_managed(model):
        raise ModelError("this model is under an engine already; use that engine, or build a new model")
    check_trainable(model)
    check_overlaps(model)
