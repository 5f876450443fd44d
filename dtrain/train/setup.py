"""Builds the objects of a run from its config."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl, restore_flash_attention_impl

from dtrain.checkpoint.frozen_source import FrozenSource
from dtrain.config.audit import Audit
from dtrain.config.dump import agreed, config_hash
from dtrain.config.fields import in_keys
from dtrain.config.model import HF_FACTORY, ModelConfig
from dtrain.config.schema import LaunchConfig, RunConfig
from dtrain.data import BatchLoader, Dataset
from dtrain.data.growing import GrowingBatches
from dtrain.data.text import ByteCodec
from dtrain.data.tokenizer import TOKENIZER, TokenizerFile
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.startup.launch_env import LaunchEnv, num_cores
from dtrain.engine.blocks.install import find_blocks
from dtrain.engine.deterministic import require_reproducible
from dtrain.engine.initialize import initialize, resolve_policy
from dtrain.engine.interface import Engine
from dtrain.engine.measurement.hooks import matching_modules
from dtrain.engine.vote.divergence import config_difference, texts_of
from dtrain.errors import ConfigError
from dtrain.models.flash_attention import choose_attention
from dtrain.models.hf import HFCausalLM
from dtrain.models.loss_head import LossHead
from dtrain.parameters.groups import find_units, matching_parameters
from dtrain.precision.contract import earlier_decisions, resolve
from dtrain.precision.forward import REDUCED_SUMS
from dtrain.precision.policy import PrecisionPolicy
from dtrain.redaction.redact import redact
from dtrain.telemetry.envelope import Envelope


def check_launcher(launch: LaunchConfig) -> None:
    """Checks that the tasks of a SLURM job were started with a rank each.

    Raises:
        ConfigError: they were not: one rank would train instead of several.
    """
    tasks = os.environ.get("SLURM_NTASKS", "")
    several = tasks.isdecimal() and int(tasks) > 1
    if several and not (LaunchEnv.read().launched or launch.num_processes or dist.is_initialized()):
        raise ConfigError(
            f"SLURM_NTASKS={tasks}, but this process is not one of several tasks that srun has started; start the "
            "ranks with srun (launch/slurm.sbatch) or launch.num_processes; launch.num_processes=1 trains on one rank"
        )


@contextmanager
def torch_settings_restored() -> Iterator[None]:
    """Restores the process-wide settings of torch that an engine changes, for the next job of a sweep."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    benchmark = torch.backends.cudnn.benchmark
    matmul = torch.get_float32_matmul_precision()
    cudnn_tf32 = torch.backends.cudnn.allow_tf32
    operators: list[Any] = [torch.backends.cudnn.conv, torch.backends.cudnn.rnn]  # type: ignore[attr-defined]
    formats = [operator.fp32_precision for operator in operators]
    products = torch.backends.cuda.matmul
    sums = {name: getattr(products, name) for name in REDUCED_SUMS}
    flash = current_flash_attention_impl()
    try:
        yield
    finally:
        enabled = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        if enabled != (deterministic, warn_only):  # the call imports torch's compiler, which takes seconds
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = benchmark
        torch.backends.cudnn.allow_tf32 = cudnn_tf32
        for operator, name in zip(operators, formats, strict=True):
            operator.fp32_precision = name
        for name, allowed in sums.items():
            setattr(products, name, allowed)
        torch.set_float32_matmul_precision(matmul)
        if current_flash_attention_impl() != flash:
            restore_flash_attention_impl() if flash is None else activate_flash_attention_impl(flash)


def set_threads(config: RunConfig, comm: Communicator) -> int:
    """Sets the number of threads of this rank, the same on all ranks, and returns it.

    It is ``launch.threads_per_rank``, else the host's cores divided by its ranks; a reproducible run on CPU takes one,
    because sums inside kernels depend on the number. Launchers' defaults differ: torchrun sets one, plain python none.
    """
    if config.launch.threads_per_rank is not None:
        threads = config.launch.threads_per_rank
    elif config.engine.reproducible and comm.device.type == "cpu":
        threads = 1
    else:
        threads = max(1, num_cores() // LaunchEnv.read().local_world_size)
    # hosts may differ in their cores
    row = torch.tensor([threads], dtype=torch.int64, device=comm.device)
    threads = int(comm.gather_rows(row, label="threads").min())
    torch.set_num_threads(threads)
    return threads


def make_policy(config: RunConfig) -> PrecisionPolicy:
    precision = config.precision
    num_rows = precision.float8.num_rows
    if num_rows is None and config.data.is_language:  # an image may have many rows of patches
        num_rows = config.train.micro_batch_size * config.model.max_seq_len
    float8 = replace(precision.float8, num_rows=num_rows)
    return PrecisionPolicy.named(precision.name, rules=precision.rules, float8=float8)


def check_patterns(config: RunConfig, model: nn.Module) -> None:
    """Raises ``ConfigError`` for a pattern of module names, advice, or a ``loss_chunk`` that does not fit ``model``.

    So does ``engine.reproducible`` with running statistics, which the engine would refuse after the run has a folder.
    Activations of modules inside of blocks that will be compiled cannot be counted, so they are no match.
    """
    if config.engine.reproducible:
        require_reproducible(model)
    contract = resolve(make_policy(config), model)
    if len(config.parts) > 1 and not contract.float8_modules:
        raise ConfigError(
            f"precision.float8.finish_in={config.precision.float8.finish_in}, but no module of this model can be FP8: "
            f"see dtrain plan precision; remove it, or set precision=bf16"
        )
    telemetry = config.telemetry
    if isinstance(loss_head := getattr(model, "loss_head", None), LossHead):
        loss_head.check_supported(contract)
        if loss_head.chunk != "none" and loss_head.name in telemetry.activations:
            raise ConfigError(
                f"telemetry.activations: '{loss_head.name}' has no output with model.loss_chunk={loss_head.chunk}, "
                "which computes no logits of a batch; remove the name, or set model.loss_chunk=none"
            )
    blocks = find_blocks(model, config.model, "model.blocks")
    counted = matching_modules(model, telemetry.activations, "telemetry.activations")
    if config.model.compile != "none" and counted:
        _check_outside_of(blocks, counted, config)
    if telemetry.advice is not None:
        probed = Envelope.read(Path(telemetry.advice)).ranges
        missing = set(probed) - {name for name, _ in model.named_parameters()}
        if 2 * len(missing) >= len(probed):  # a few may differ, such as a new head
            raise ConfigError(
                f"telemetry.advice={telemetry.advice} is of another model: {len(missing)} of its {len(probed)} "
                f"parameters are not in this one; run dtrain probe on this configuration"
            )
    matching_parameters(model, config.engine.as_native().keep_gathered, "keep_gathered")
    find_units(model, config.engine.sharding_units)


def _check_outside_of(
    blocks: Sequence[tuple[str, nn.Module]], counted: Mapping[str, nn.Module], config: RunConfig
) -> None:
    """Raises ``ConfigError`` for a pattern of activations that matches only modules inside of ``blocks``."""
    inside = {id(part): name for name, block in blocks for part in list(block.modules())[1:]}
    for pattern in config.telemetry.activations:
        matches = [module for name, module in counted.items() if fnmatchcase(name, pattern)]
        if all(id(module) in inside for module in matches):
            block = inside[id(matches[0])]
            raise ConfigError(
                f"telemetry.activations: '{pattern}' matches only modules inside of blocks, such as '{block}', that "
                f"model.compile={config.model.compile} compiles, and compiled code runs without hooks; name blocks, "
                f"such as [{block}], or set model.compile=none"
            )


def check_inputs(model: nn.Module, dataset: Dataset) -> None:
    """Checks that ``model`` takes the positions of tokens if the data gives them.

    Raises:
        ConfigError: it does not, so its tokens would see those of other documents.
    """
    first = dataset.train.order(0, np.zeros(1, dtype=np.int64))
    if "positions" not in dataset.train.batch(first):
        return
    if isinstance(model, HFCausalLM):
        model.check_positions()
    parameters = inspect.signature(model.forward).parameters
    if "positions" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise ConfigError(
            f"the data keeps the documents of a sample apart by positions, but {type(model).__name__}.forward takes "
            f"only ({', '.join(parameters)}); add positions to forward, or train it on data=tokens data.documents=cross"
        )


def check_tokenizer(config: ModelConfig, dataset: Dataset) -> None:
    """Checks that the tokens of the data are those on which the model of ``model.path`` was trained.

    Tokens that only one of both tokenizers has are no difference. Nothing is checked if one of them is not known.

    Raises:
        ConfigError: a token has another meaning.
    """
    if config.factory != HF_FACTORY or config.weights != "load" or not (Path(str(config.path)) / TOKENIZER).is_file():
        return
    own = TokenizerFile(Path(str(config.path)))
    if isinstance(dataset.codec, ByteCodec):
        raise ConfigError(
            f"the tokens of the data are bytes, but those of model.path are of {own.path}; choose data with that "
            f"tokenizer, such as data=text data.tokenizer={own.path}, or model.weights=random"
        )
    if dataset.tokenizer_file is None:
        return
    other = TokenizerFile(dataset.tokenizer_file)
    meanings = {token: text for text, token in own.vocabulary.items()}
    differ = [(token, text) for text, token in other.vocabulary.items() if meanings.get(token, text) != text]
    if differ:
        token, text = min(differ)
        raise ConfigError(
            f"{len(differ)} tokens of the data differ from those of model.path: token {token} is {text!r} in "
            f"{other.path}, and {meanings[token]!r} in {own.path}; tokenize the data with the latter"
        )


def check_precision(config: RunConfig, device: torch.device) -> None:
    """Checks the precision of ``config`` on ``device``; raises as ``dtrain.engine.initialize.resolve_policy``."""
    resolve_policy(config.engine, make_policy(config), device)


def make_engine(
    config: RunConfig, model: nn.Module, comm: Communicator, saved_contract: Mapping[str, Any] | None = None
) -> Engine:
    policy = make_policy(config).on(comm.device)
    policy = replace(policy, decisions=earlier_decisions(saved_contract or {}, policy))
    choose_attention(config, comm, policy.compute_dtype)
    optimizer = config.optim.optimizer
    lora = config.model.lora.r > 0 and config.model.weights == "load"
    try:
        return initialize(
            model,
            frozen_source=FrozenSource(str(config.model.path)) if lora else None,
            optimizer=optimizer,
            schedule=config.schedule.over(config.train.steps),
            engine=config.engine,
            precision=policy,
            loss_scale=config.precision.loss_scale,
            max_grad_norm=config.optim.max_grad_norm,
            ema_decay=config.ema.decay,
            missing_grad=config.optim.missing_grad,
            audit=config.audit,
            blocks=config.model.block_options,
            seed=config.seed,
            comm=comm,
        )
    except ConfigError as error:  # of a class that is imported only now
        raise in_keys(error, type(optimizer), "optim.") from None


def make_loader(config: RunConfig, dataset: Dataset, engine: Engine) -> GrowingBatches:
    """Returns the batches of this rank from the next step of ``engine`` on."""
    train, growth, step = config.train, config.batch_growth, engine.attempted_steps
    loader = BatchLoader(
        dataset.train,
        seed=config.seed,
        micro_batch_size=train.micro_batch_size,
        num_micro_batches=growth.at(step).global_batch_size // (train.micro_batch_size * engine.world_size),
        rank=engine.rank,
        world_size=engine.world_size,
        cursor=engine.data_cursor,
    )
    return GrowingBatches(loader, growth, step)


def check_same(comm: Communicator, config: RunConfig, dataset: Dataset) -> None:
    """Checks that all ranks have the same config and the same data.

    Raises:
        ConfigError: on every rank, naming the first rank that differs from rank 0, and the key with both values.
    """
    own = {"hash": config_hash(config), "data": dataset.fingerprint}
    records = [json.loads(text) for text in comm.exchange_text(json.dumps(own))]
    first = records[0]
    for rank, record in enumerate(records):
        if record["hash"] != first["hash"]:
            # the values are for messages, so without secrets; the hash is of the real ones
            expected, got = map(json.loads, texts_of(comm, json.dumps(redact(agreed(config))), rank))
            difference = config_difference(expected, got, rank)
            raise ConfigError(f"the ranks were started with different configs: {difference}")
    for rank, record in enumerate(records):
        if record["data"] != first["data"]:
            raise ConfigError(
                f"the data differs: sha256 {first['data'][:12]} on rank 0 and {record['data'][:12]} on rank {rank}; "
                f"start every rank with the same command and the same files"
            )


def executable(config: RunConfig, device_type: str, capability: tuple[int, int]) -> RunConfig:
    """Returns ``config`` as fake CPU tensors can run it in place of a device, for a plan.

    What a device of this ``capability`` decides is decided, and nothing is compiled.
    """
    precision = config.precision
    if device_type == "cuda":
        if precision.name == "auto":
            precision = replace(precision, name="bf16" if capability >= (8, 0) else "fp16")
        elif precision.name == "tf32":  # the same tensors
            precision = replace(precision, name="fp32")
    if precision.name == "fp8" or "fp8" in precision.rules.values():
        float8 = precision.float8
        emulate: Any = float8.emulate
        if emulate == "auto" and device_type == "cuda":
            emulate = capability < (8, 9)
        choice = "all" if float8.choice in ("auto", "timed") else float8.choice
        precision = replace(precision, float8=replace(float8, emulate=emulate, choice=choice, compile=False))
    optim: Any = config.optim
    if hasattr(optim, "compile"):
        optim = replace(optim, compile=False)
    engine = replace(config.engine.as_native(), graph=False)  # which has the activations of the same model
    if engine.offload == "cpu" and device_type == "cuda":  # stage 1 is as 2, down to the dtype that is sent
        engine = replace(engine, zero_stage=max(engine.zero_stage, 2))
    model = replace(config.model, compile="none")
    audit = Audit(every=0)  # it reads values
    return replace(config, precision=precision, optim=optim, engine=engine, model=model, audit=audit)
