"""Checks of a resolved configuration across keys: values that contradict each other, or would be ignored."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from dtrain.config.capabilities import SETTINGS, check
from dtrain.config.fields import check_fields
from dtrain.config.precision import Float8Config, LossScaleConfig, PrecisionConfig, check_rules
from dtrain.config.schema import (
    DEFAULT_FACTORY,
    FACTORY_FORM,
    GPT2_FACTORY,
    GROUP_OPTIONS,
    CheckpointConfig,
    DataConfig,
    LaunchConfig,
    ModelConfig,
    NativeEngineConfig,
    OptimConfig,
    RunConfig,
    TextDataConfig,
    TrainConfig,
    WSDConfig,
)
from dtrain.config.tool_schema import (
    AcceptConfig,
    CheckpointBenchConfig,
    CollectivesBenchConfig,
    ParitySuiteConfig,
    PrecisionBenchConfig,
    SuiteConfig,
)
from dtrain.errors import ConfigError, nearest


def check_config(config: RunConfig, world_size: int) -> None:
    """Checks each field, then the groups against each other and against the number of ranks.

    Raises:
        ConfigError: the first thing at fault, its value, and what to change.
    """
    check_fields(config)
    _check_names(config)
    _check_text(config)
    _check_data(config.data)
    _check_batch(config.train, world_size)
    _check_schedule(config)
    _check_optim(config.optim)
    _check_precision(config.precision)
    _check_loss_scale(config.precision)
    _check_model(config.model)
    _check_checkpoint(config.checkpoint)
    _check_launch(config.launch)
    _check_capabilities(config)
    if isinstance(config.engine, NativeEngineConfig):
        _check_engine(config.engine)


def check_parity_engine(config: ParitySuiteConfig, engine: str) -> None:
    """Checks the training run of ``dtrain parity`` with one engine.

    Raises:
        ConfigError: as :func:`check_config`, in the keys of ``dtrain parity``.
    """
    try:
        check_config(config.training(engine), config.parity.ranks)
    except ConfigError as error:
        text = re.sub(r"\btrain\.", "parity.", str(error))
        raise ConfigError(re.sub(r"\bengine\.(?=\w)", f"engines.{engine}.", text)) from None


def check_suite(config: Any) -> None:
    """Checks the configuration of a suite of ``dtrain bench``, of ``dtrain parity``, or of ``dtrain accept``.

    Raises:
        ConfigError: the first thing at fault, its value, and what to change.
    """
    check_fields(config)
    if isinstance(config, ParitySuiteConfig):
        _check_parity(config)
        return
    if isinstance(config, AcceptConfig):
        return
    bench = config.bench
    if bench.out == "":
        raise ConfigError("bench.out is empty; name a JSON file, or leave it null")
    if isinstance(bench, CollectivesBenchConfig):
        unit = 1024 * bench.ranks
        if not bench.sizes or any(size < unit for size in bench.sizes):
            raise ConfigError(f"bench.sizes={bench.sizes} must be one or more numbers, each at least {unit}")
    if isinstance(bench, CheckpointBenchConfig) and (not bench.sizes or min(bench.sizes) < 1):
        raise ConfigError(f"bench.sizes={bench.sizes} must be one or more numbers of MB, each at least 1")
    if not isinstance(config, SuiteConfig):
        return
    _check_names(config)
    _check_data(config.data)
    _check_optim(config.optim)
    _check_model(config.model)
    if isinstance(bench, PrecisionBenchConfig):
        _check_list("bench.precisions", bench.precisions, ("fp32", "tf32", "bf16", "fp16"))


def _check_parity(config: ParitySuiteConfig) -> None:
    engines = config.parity.engines
    if engines == []:
        raise ConfigError("parity.engines is empty; list some, or leave it null for all that can run here")
    _check_list("parity.engines", engines or [], tuple(GROUP_OPTIONS["engine"]))
    for engine in engines or ["native"]:  # the others may not run here
        check_parity_engine(config, engine)


def _check_list(key: str, values: list[Any], choices: tuple[Any, ...]) -> None:
    for value in values:
        if value not in choices or values.count(value) > 1:
            raise ConfigError(f"{key}={values} must list some of {', '.join(map(str, choices))}, each once")


def _check_names(config: RunConfig | SuiteConfig) -> None:
    for group, options in GROUP_OPTIONS.items():
        record = getattr(config, group, None)
        if record is not None and options.get(record.name) is not type(record):
            hint = nearest(f"{group}={record.name}", [f"{group}={option}" for option in options])
            raise ConfigError(f"{group}.name={record.name} does not choose an option; use {group}=OPTION{hint}")


def _check_text(config: RunConfig) -> None:
    if config.run_dir == "":
        raise ConfigError("run_dir is empty; name a folder, or leave it null for runs/<date>_<time>")
    if config.resume == "":
        raise ConfigError("resume is empty; it is auto, none, or the path of a checkpoint")


def _check_data(data: DataConfig) -> None:
    if isinstance(data, TextDataConfig) and not data.files:
        raise ConfigError("data=text needs data.files, a glob such as data.files='/data/**/*.txt'")


def _check_batch(train: TrainConfig, world_size: int) -> None:
    unit = train.micro_batch_size * world_size
    if train.global_batch_size % unit == 0:
        return
    below = train.global_batch_size // unit * unit
    sizes = " or ".join(str(size) for size in (below, below + unit) if size)
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    raise ConfigError(
        f"train.global_batch_size={train.global_batch_size} does not divide by train.micro_batch_size="
        f"{train.micro_batch_size} x {ranks}; the nearest that {'do' if below else 'does'}: {sizes}"
    )


def _check_schedule(config: RunConfig) -> None:
    schedule, steps = config.schedule, config.train.steps
    warmup = schedule.resolve_warmup_steps(steps)
    if warmup > steps:
        raise ConfigError(
            f"schedule.warmup_steps={warmup} is more than train.steps={steps}; "
            f"set schedule.warmup_steps to at most {steps}"
        )
    if isinstance(schedule, WSDConfig) and warmup + schedule.decay_steps > steps:
        raise ConfigError(
            f"schedule.warmup_steps={warmup} + schedule.decay_steps={schedule.decay_steps} is more than "
            f"train.steps={steps}; their sum must be at most {steps}"
        )


def _check_optim(optim: OptimConfig) -> None:
    if len(optim.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in optim.betas):
        raise ConfigError(f"optim.betas={list(optim.betas)} must be two numbers in [0, 1), such as [0.9, 0.95]")


def _check_precision(precision: PrecisionConfig) -> None:
    check_rules(precision.rules.items())
    by_rule = "fp8" in precision.rules.values()
    if by_rule and precision.name not in ("auto", "bf16", "fp8"):
        raise ConfigError(
            f"an fp8 rule under precision={precision.name}: FP8 products return BF16, so the rest computes in BF16; "
            f"use precision=fp8 or bf16"
        )
    float8 = precision.float8
    for item in fields(float8):
        value = getattr(float8, item.name)
        if value != getattr(Float8Config(), item.name) and not by_rule and precision.name != "fp8":
            raise ConfigError(
                f"precision.float8.{item.name}={value} is not used with precision={precision.name} and no fp8 rule; "
                f"remove it, or set precision=fp8"
            )


_CALIBRATION_KEYS = {"calibration_steps", "margin"}


def _check_loss_scale(precision: PrecisionConfig) -> None:
    scale, default = precision.loss_scale, LossScaleConfig()
    used = _used_scale_keys(precision)
    for item in fields(scale):
        value = getattr(scale, item.name)
        if item.name not in used and value != getattr(default, item.name):
            fix = "calibrated" if item.name in _CALIBRATION_KEYS else "dynamic"
            raise ConfigError(
                f"precision.loss_scale.{item.name}={value} is not used with precision={precision.name} and "
                f"precision.loss_scale.mode={scale.mode}; remove it, or set precision.loss_scale.mode={fix}"
            )
    if "max" in used and not scale.min <= scale.init <= scale.max:
        raise ConfigError(
            f"precision.loss_scale.init={scale.init} must lie between precision.loss_scale.min={scale.min} and "
            f"precision.loss_scale.max={scale.max}"
        )


def _used_scale_keys(precision: PrecisionConfig) -> set[str]:
    mode = precision.loss_scale.mode
    has_fp16 = precision.name in ("fp16", "auto") or "fp16" in precision.rules.values()
    if mode == "none" or (mode == "auto" and not has_fp16):
        return {"mode"}
    if mode == "static":
        return {"mode", "init"}
    keys = {item.name for item in fields(LossScaleConfig)}
    return keys if mode == "calibrated" else keys - _CALIBRATION_KEYS


def _check_model(model: ModelConfig) -> None:
    if not FACTORY_FORM.fullmatch(model.factory):
        raise ConfigError(f"model.factory={model.factory} must be package.module:function, such as {DEFAULT_FACTORY}")
    if model.factory not in (DEFAULT_FACTORY, GPT2_FACTORY):
        return
    if model.args:
        raise ConfigError(
            f"model.args.{next(iter(model.args))} is for a model.factory of your own; the built-in one takes none"
        )
    if model.hidden_dim % model.num_heads:
        raise ConfigError(
            f"model.hidden_dim={model.hidden_dim} does not divide by model.num_heads={model.num_heads}; "
            "each head takes the same share"
        )
    if model.factory == GPT2_FACTORY:
        for key in ("num_kv_heads", "rope_theta"):
            if getattr(model, key) != getattr(ModelConfig(), key):
                raise ConfigError(
                    f"model.{key}={getattr(model, key)} is not used with model.factory={GPT2_FACTORY}, which has no "
                    "grouped queries and learned positions; remove it"
                )
        return
    if model.hidden_dim // model.num_heads % 2:
        raise ConfigError(
            f"model.hidden_dim={model.hidden_dim} / model.num_heads={model.num_heads} gives heads of odd dim "
            f"{model.hidden_dim // model.num_heads}; rotary position embedding rotates pairs, so make it even"
        )
    if model.num_kv_heads is not None and model.num_heads % model.num_kv_heads:
        raise ConfigError(
            f"model.num_heads={model.num_heads} does not divide by model.num_kv_heads={model.num_kv_heads}; "
            "each key-value head serves the same number of heads"
        )


def _check_checkpoint(checkpoint: CheckpointConfig) -> None:
    if checkpoint.when_busy == "skip" and not checkpoint.asynchronous:
        raise ConfigError(
            "checkpoint.when_busy=skip works only with checkpoint.asynchronous=true: a synchronous save has ended "
            "before the next one is due; remove it, or set checkpoint.asynchronous=true"
        )


def _check_launch(launch: LaunchConfig) -> None:
    if isinstance(launch.num_processes, str) and launch.num_processes != "auto":
        raise ConfigError(
            f"launch.num_processes={launch.num_processes} must be a number, auto (one a GPU), or null (this process)"
        )


def _check_capabilities(config: RunConfig) -> None:
    engine = config.engine
    keys = {item.name: getattr(engine, item.name) for item in fields(engine) if item.name in SETTINGS}
    format_key = {
        "precision": "precision",
        "rules": "precision.rules",
        "compile": "optim.compile",
    }
    for name in dict.fromkeys(("fp32", *config.precision.rules.values())):
        check(
            engine.name,
            format_key=lambda key: format_key.get(key, f"engine.{key}"),
            **keys,
            precision=config.precision.name,
            rules=name,
            compile=config.optim.compile,
        )


def _check_engine(engine: NativeEngineConfig) -> None:
    if engine.grad_reduction != "auto" and engine.zero_stage != 1:
        raise ConfigError(
            f"engine.grad_reduction={engine.grad_reduction} is used with engine.zero_stage=1 only, and "
            f"engine.zero_stage={engine.zero_stage}; remove it, or set engine.zero_stage=1"
        )
    if engine.grad_reduction != "auto" and engine.reproducible:
        raise ConfigError(
            f"engine.grad_reduction={engine.grad_reduction} has no effect with engine.reproducible=true, "
            "which sums at the owner of each shard; remove one of them"
        )
    for key in ("reshard_after_forward", "prefetch", "keep_gathered"):
        if engine.zero_stage != 3 and getattr(engine, key) != getattr(NativeEngineConfig(), key):
            raise ConfigError(
                f"engine.{key}={getattr(engine, key)} is used with engine.zero_stage=3 only, and "
                f"engine.zero_stage={engine.zero_stage}; remove it, or set engine.zero_stage=3"
            )
