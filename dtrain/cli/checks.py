"""Checks of a resolved configuration across its records, which have checked themselves."""

from __future__ import annotations

import re
from typing import Any

from dtrain.config.blocks import Blocks
from dtrain.config.capabilities import SETTINGS
from dtrain.config.data import DataConfig
from dtrain.config.fields import in_keys
from dtrain.config.model import DENOISER_FACTORY, LANGUAGE_FACTORIES, MLP_FACTORY, USED_KEYS, ModelConfig
from dtrain.config.precision import Float8, LossScale, PrecisionConfig
from dtrain.config.probe import PROBED_FORMATS, ProbeConfig
from dtrain.config.records import check_records
from dtrain.config.schedule import ScheduleConfig
from dtrain.config.schema import GROUP_OPTIONS, RunConfig
from dtrain.config.tool_schema import (
    BLOCK_CASES,
    STEP_CASES,
    AcceptConfig,
    BenchConfig,
    BlocksBenchConfig,
    CheckpointBenchConfig,
    CollectivesBenchConfig,
    Float8BenchConfig,
    ParitySuiteConfig,
    PrecisionBenchConfig,
    StepBenchConfig,
)
from dtrain.errors import ConfigError


def check_config(config: RunConfig, world_size: int, num_planned: int | None = None) -> None:
    """Checks the records against each other and against the number of ranks.

    Args:
        config: of the run.
        world_size: ranks that this command would start.
        num_planned: ranks of the job, if it is only planned; its batch is made to fit.

    Raises:
        ConfigError: the first thing at fault, its value, and what to change.
    """
    _check_task(config.model, config.data)
    if config.train.seq_len is not None and not config.data.is_language:
        raise ConfigError(f"train.seq_len={config.train.seq_len} is for tokens; remove it with data={config.data.name}")
    try:
        config.engine.check_ranks(num_planned or world_size)
    except ConfigError as error:
        raise in_keys(error, type(config.engine), "engine.") from None
    _check_batch(config, world_size)
    _check_seq_len(config)
    _check_schedule(config.schedule, config.train.steps)
    keys = {"precision": "precision", "rules": "precision.rules", "compile": "optim.compile", "optimizer": "optim"}
    keys |= {"replay_every": "audit.replay_every", "compile_blocks": "model.compile"}
    precision = config.precision
    check_records(
        *(config.engine, config.optim, config.audit, config.model, precision.name, precision.rules.values()),
        format_key=lambda key: keys.get(key, f"engine.{key}"),
    )
    for finish in config.parts[1:]:
        _check_finish(config)
        check_config(finish, world_size, num_planned)


def check_parity_engine(config: ParitySuiteConfig, engine: str) -> None:
    """Checks the training run of ``dtrain parity`` with one engine.

    Raises:
        ConfigError: as ``check_config``, in the keys of ``dtrain parity``.
    """
    try:
        check_config(config.training(engine), config.parity.ranks)
    except ConfigError as error:
        raise ConfigError(re.sub(r"\btrain\.", "parity.", str(error))) from None


def check_suite(config: Any) -> None:
    """Checks the configuration of a command other than ``dtrain train``.

    Raises:
        ConfigError: the first thing at fault, its value, and what to change.
    """
    float8 = getattr(getattr(config, "precision", None), "float8", Float8())
    if float8.finish_in != "none":
        raise ConfigError(f"precision.float8.finish_in={float8.finish_in} is for dtrain train; remove it")
    if isinstance(config, ProbeConfig):
        _check_probe(config)
        return
    optim = getattr(config, "optim", None)
    if optim is not None and optim.name != "adamw":
        raise ConfigError(f"optim={optim.name} is for dtrain train; this command compares with AdamW: take optim=adamw")
    if optim is not None and optim.groups:
        raise ConfigError("optim.groups is for dtrain train; this command compares with one AdamW, so remove it")
    if isinstance(config, ParitySuiteConfig):
        _check_parity(config)
        return
    if isinstance(config, AcceptConfig):
        return
    if hasattr(config, "model") and hasattr(config, "data"):
        _check_task(config.model, config.data)
    bench = config.bench
    if bench.out == "":
        raise ConfigError("bench.out is empty; name a JSON file, or leave it null")
    if isinstance(bench, CollectivesBenchConfig):
        unit = 1024 * bench.ranks
        if not bench.sizes or any(size < unit for size in bench.sizes):
            raise ConfigError(f"bench.sizes={bench.sizes} must be one or more numbers, each at least {unit}")
    if isinstance(bench, CheckpointBenchConfig) and (not bench.sizes or min(bench.sizes) < 1):
        raise ConfigError(f"bench.sizes={bench.sizes} must be one or more numbers of MB, each at least 1")
    if isinstance(bench, PrecisionBenchConfig):
        _check_list("bench.precisions", bench.precisions, ("fp32", "tf32", "bf16", "fp16"))
    if isinstance(bench, BlocksBenchConfig | StepBenchConfig):
        cases = BLOCK_CASES if isinstance(bench, BlocksBenchConfig) else STEP_CASES
        _check_list("bench.cases", bench.cases, tuple(cases))
        if not bench.cases:
            raise ConfigError(f"bench.cases is empty; list some of {', '.join(cases)}")
    if isinstance(bench, StepBenchConfig) and bench.ranks > 1:
        raise ConfigError(f"bench.ranks={bench.ranks}: this suite measures one device; take dtrain bench engine")
    if isinstance(bench, BenchConfig) and bench.data == "random" and not config.data.is_language:
        raise ConfigError("bench.data=random makes tokens; for images or numbers take bench.data=device")
    if isinstance(bench, BlocksBenchConfig):
        for name in ("recompute", "recompute_every", "offload_activations", "compile"):
            if (value := getattr(config.model, name)) != getattr(Blocks(), name):
                raise ConfigError(f"model.{name}={value} has no effect here; list what to measure in bench.cases")
    if isinstance(bench, Float8BenchConfig):
        _check_list("bench.recipes", bench.recipes, Float8.__dataclass_fields__["recipe"].metadata["choices"])


def _check_parity(config: ParitySuiteConfig) -> None:
    parity, engines = config.parity, config.parity.engines
    for key, choices, default in (
        ("engines", tuple(GROUP_OPTIONS["engine"]), "all that can run here"),
        ("precisions", SETTINGS["precision"][1:], "the run's"),
        ("stages", SETTINGS["zero_stage"], "each engine's own"),
    ):
        if (values := getattr(parity, key)) == []:
            raise ConfigError(f"parity.{key} is empty; list some, or leave it null for {default}")
        _check_list(f"parity.{key}", values or [], choices)
    for key, reference in (("precisions", "cpu"), ("stages", "cpu"), ("weight_bound", "oracle")):
        if getattr(parity, key) is not None and parity.reference != reference:
            raise ConfigError(f"parity.{key} has no effect without parity.reference={reference}; remove it")
    for engine in engines or ["native"]:  # the others may not run here
        check_parity_engine(config, engine)


def _check_probe(config: ProbeConfig) -> None:
    formats, precision = config.formats or PROBED_FORMATS, config.precision
    if "fp8" in precision.rules.values() and "fp16" in formats:
        raise ConfigError(
            "precision.rules has fp8, which excludes a trial in fp16: FP8 products return BF16; set formats=[bf16,fp8]"
        )
    try:
        trials = [config.training(name) for name in formats]
        for trial in trials:
            check_config(trial, world_size=1)
    except ConfigError as error:
        text = str(error)
        for record, key in ((PrecisionConfig, "precision."), (LossScale, "precision.loss_scale.")):
            text = str(in_keys(ConfigError(text), record, key))
        raise ConfigError(re.sub(r"\btrain\.steps\b", "steps", text)) from None
    for name, default in (("loss_scale", LossScale()), ("float8", Float8())):
        given = getattr(precision, name)
        if given != default and not any(getattr(trial.precision, name) == given for trial in trials):
            user = {"loss_scale": "fp16", "float8": "fp8"}[name]
            raise ConfigError(
                f"precision.{name} is set, but no trial of formats={list(formats)} uses it; add {user}, or remove it"
            )


def _check_list(key: str, values: list[Any], choices: tuple[Any, ...]) -> None:
    for value in values:
        if value not in choices or values.count(value) > 1:
            raise ConfigError(f"{key}={values} must list some of {', '.join(map(str, choices))}, each once")


def _check_task(model: ModelConfig, data: DataConfig) -> None:
    """Checks that a built-in model is for the data: tokens, images or numbers."""
    if data.is_language:
        if model.factory in USED_KEYS:
            suited = "arrays or friedman" if model.factory == MLP_FACTORY else "images or glyphs"
            raise ConfigError(
                f"model={model.name} takes images or numbers, but data={data.name} has tokens; choose data={suited}"
            )
        return
    task = getattr(data, "task", None)
    suited = {"denoising": "denoiser", "classification": "convnet, vit or mlp"}.get(str(task), "mlp")
    if model.factory in LANGUAGE_FACTORIES:
        raise ConfigError(f"model={model.name} takes tokens, which data={data.name} has not; choose model={suited}")
    if (model.factory == DENOISER_FACTORY) != (task == "denoising") and model.factory in USED_KEYS:
        given = f"data={data.name}" if task is None else f"data.task={task}"
        or_task = "data.task=denoising, or " if task == "classification" else ""
        raise ConfigError(f"model={model.name} does not learn {given}; choose {or_task}model={suited}")


def _check_batch(config: RunConfig, world_size: int) -> None:
    train = config.train
    unit = train.micro_batch_size * world_size
    for phase in config.batch_growth.phases:
        size = phase.global_batch_size
        if size % unit == 0:
            continue
        below = size // unit * unit
        sizes = " or ".join(str(size) for size in (below, below + unit) if size)
        ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
        when = f" from step {phase.first_step}" if isinstance(train.global_batch_size, dict) else ""
        raise ConfigError(
            f"train.global_batch_size={size}{when} does not divide by train.micro_batch_size="
            f"{train.micro_batch_size} x {ranks}; the nearest that {'do' if below else 'does'}: {sizes}"
        )


def _check_seq_len(config: RunConfig) -> None:
    train, whole = config.train, config.targets_per_sample
    for phase in config.batch_growth.phases:
        length = phase.seq_len
        if whole % length == 0:
            continue
        divisors = [divisor for divisor in range(1, whole + 1) if whole % divisor == 0]
        nearest = [max(d for d in divisors if d < length), *[d for d in divisors if d > length][:1]]
        when = f" from step {phase.first_step}" if isinstance(train.seq_len, dict) else ""
        raise ConfigError(
            f"train.seq_len={length}{when} does not divide model.max_seq_len={whole} into equal rows; the nearest that "
            f"{'do' if len(nearest) > 1 else 'does'}: {' or '.join(map(str, nearest))}"
        )
    if train.seq_len is not None and config.data.name == "chat":
        raise ConfigError(
            "train.seq_len cuts samples into rows, which would part the answers of data=chat from their questions; "
            "remove it, and lower model.max_seq_len for shorter conversations"
        )


def _check_finish(config: RunConfig) -> None:
    if config.switch_step <= 0:
        raise ConfigError(
            f"precision.float8.finish_steps={config.precision.float8.finish_steps} is not below train.steps="
            f"{config.train.steps}, so that no step would compute in FP8; lower it, or set precision=bf16 alone"
        )


def _check_schedule(schedule: ScheduleConfig, steps: int) -> None:
    try:
        schedule.over(steps)
    except ConfigError as error:
        kind = type(schedule)
        text = str(error).replace(f"{kind.__name__}.total_steps", "train.steps")
        raise in_keys(ConfigError(text), kind, "schedule.") from None
