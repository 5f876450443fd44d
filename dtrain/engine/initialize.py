"""``dtrain.initialize``: builds an engine from a model and a few records."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass, replace
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dtrain.config.capabilities import CAPABILITIES, SETTINGS, check
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.consensus import on_rank_0
from dtrain.distributed.launch_env import LaunchEnv
from dtrain.distributed.logging import logger
from dtrain.distributed.setup import choose_device, connect
from dtrain.engine.interface import Engine
from dtrain.engine.model_state import is_managed
from dtrain.engine.request import EngineOptions, EngineRequest, RunIdentity, StepOptions, UnshardOptions
from dtrain.engine.vote.divergence import config_difference
from dtrain.errors import ConfigError, DivergenceError, ModelError
from dtrain.optim.adamw import AdamW
from dtrain.optim.schedule import Constant, Schedule
from dtrain.precision.contract import Contract, float8_candidates, resolve
from dtrain.precision.float8.choice import Float8Decision, decide_float8
from dtrain.precision.forward import set_matmul_precision
from dtrain.precision.loss_scale import LossScale
from dtrain.precision.policy import PrecisionPolicy, check_trainable
from dtrain.precision.rules import format_name
from dtrain.sharding.placement import STAGES


def initialize(
    model: nn.Module,
    *,
    optimizer: AdamW | None = None,
    schedule: Schedule | None = None,
    engine: str = "native",
    zero_stage: int | None = None,
    precision: str | PrecisionPolicy = "auto",
    loss_scale: str | float | LossScale = "auto",
    max_grad_norm: float | None = 1.0,
    groups: str | Sequence[str] = "auto",
    reproducible: bool = False,
    grad_reduction: str = "auto",
    reduce_dtype: str = "auto",
    reshard_after_forward: bool = True,
    prefetch: int = 1,
    keep_gathered: Sequence[str] = (),
    offload: str = "none",
    max_consecutive_skips: int = 50,
    seed: int | None = None,
    comm: Communicator | None = None,
) -> Engine:
    """Builds an engine for ``model``; every rank calls it with the same arguments.

    The engine manages the model's trainable parameters from then on, in place: they become its compute weights. Rank
    0's weights and buffers are broadcast. Options that an engine does not support are refused with the reason
    (:mod:`dtrain.config.capabilities`). An existing process group is used; else one is created from the launcher's
    environment. A single rank needs none.

    Args:
        model: any ``nn.Module`` with values (not on ``meta``); it is moved to the rank's device.
        optimizer: AdamW's hyper-parameters; ``AdamW()`` by default.
        schedule: learning rate by applied steps; constant by default.
        engine: ``native``, ``fsdp2``, ``deepspeed`` or ``ddp``.
        zero_stage: 0 to 3: which of replicas, gradients, masters and moments are sharded; None: 2, and 0 with ``ddp``.
            At stage 3, and with ``fsdp2``, a forward is a collective: all ranks run the same modules in the same order,
            in :meth:`Engine.eval` too.
        precision: ``auto``, ``fp32``, ``tf32``, ``bf16``, ``fp16``, ``fp8``, or a policy, which may have rules.
        loss_scale: ``auto`` (dynamic if anything is FP16, else none), ``none``, ``dynamic``, ``calibrated``, a
            number, or a record.
        max_grad_norm: clipping threshold of the global norm; None clips nothing.
        groups: units of sharding: ``auto`` (each element of a ModuleList or Sequential) or module-name patterns.
        reproducible: canonical sums, keyed RNG and deterministic kernels: equal bits at any world size and stage.
        grad_reduction: ``auto`` (reduce_scatter), ``all_reduce`` or ``reduce_scatter``; concerns stage 1 only.
        reduce_dtype: dtype in which gradients of compute-dtype replicas are sent: ``fp32``, ``bf16`` or ``fp16``.
            ``auto``: each micro-batch's gradients are sent in their own dtype (stages 2 and 3, reproducible), and FP32
            sums of them in FP32 (stages 0 and 1). Sums over ranks are always formed in FP32.
        reshard_after_forward: reshard a group after its forward, else after its backward; stage 3 only.
        prefetch: number of groups unsharded ahead of their use; stage 3 only.
        keep_gathered: name patterns of modules and parameters that stay unsharded for the whole forward and backward,
            because something outside their group reads them; stage 3 only.
        offload: ``cpu`` keeps masters and moments in host memory; ``deepspeed`` only.
        max_consecutive_skips: number of skipped steps in a row that ends the run.
        seed: of dropout and other random numbers; None takes rank 0's ``torch.initial_seed()``.
        comm: the ranks to train with; None finds or creates the process group.

    Raises:
        ConfigError: a value that cannot be honoured.
        ModelError: a parameter that cannot be trained.
        DivergenceError: the ranks were given different arguments or models.
    """
    stage = _stage(engine, zero_stage)
    options = StepOptions(
        optimizer or AdamW(), schedule or Constant(), max_grad_norm, stage, reproducible, max_consecutive_skips
    )
    engine_options = EngineOptions(
        groups, grad_reduction, UnshardOptions(reshard_after_forward, prefetch, tuple(keep_gathered)), offload
    )
    policy = precision if isinstance(precision, PrecisionPolicy) else PrecisionPolicy.named(precision)
    # first what needs no other rank: a mistake is reported before a process group is created
    _check_arguments(engine, options, engine_options, policy, reduce_dtype)
    rule = LossScale.of(loss_scale)
    if is_managed(model):
        raise ModelError("this model is under an engine already; use that engine, or build a new model")
    check_trainable(model)
    if reproducible:
        _require_reproducible(model)
    if comm is None:
        device = _rank_device(model)
        policy = policy.on(device)
        comm = connect(device)
    _check_ranks(engine, comm)
    policy = resolve_policy(
        engine, policy, comm.device, zero_stage=stage, reproducible=reproducible, reduce_dtype=reduce_dtype
    )
    model.to(comm.device)
    options = replace(options, optimizer=options.optimizer.on(comm.device))
    identity = _agree_on_identity(comm, seed)
    given = resolve(policy, model, CAPABILITIES[engine].held, policy.decisions)
    rule = rule.resolved(torch.float16 if given.needs_loss_scale else policy.compute_dtype)
    # before rank 0 decides for all: it times products of its own model, which must be that of all ranks
    _require_equal_configs(comm, _config_text(engine, model, given, options, engine_options, rule))
    if reproducible:
        _use_deterministic_kernels(comm.device)  # before the first product, which may be one that is timed below
    contract = _with_decisions(given, model, comm, casts_each_time=CAPABILITIES[engine].casts_each_time)
    config_text = _config_text(engine, model, contract, options, engine_options, rule)
    set_matmul_precision(policy)
    # before anything is cast: masters take the unrounded values
    _broadcast_model(model, comm)
    _cast_frozen(model, contract)
    request = EngineRequest(model, contract, comm, options, engine_options, rule.start(), identity, config_text)
    # imported by name, because the libraries of the other engines need not be installed
    built: Engine = import_module(f"dtrain.engine.{engine}").build(request)
    for line in built.contract.describe():
        logger.info(line)
    if comm.rank == 0 and (warning := underflow_warning(contract, rule)):
        logger.warning(warning)
    return built


def underflow_warning(contract: Contract, rule: LossScale) -> str:
    """Returns a warning if gradients are FP16 and the loss is never scaled up, else an empty string."""
    # 6e-8 is the smallest subnormal number of FP16
    is_scaled = rule.mode in ("dynamic", "calibrated") or (rule.mode == "static" and rule.init > 1)
    if is_scaled or not contract.needs_loss_scale:
        return ""
    return (
        f"loss scale mode '{rule.mode}' never scales the loss up, and gradients are FP16: those below 6e-8 vanish; "
        f"use a dynamic or calibrated loss scale, or a constant one above 1"
    )


def _stage(engine: str, given: int | None) -> int:
    if given is not None:
        return given
    stages = CAPABILITIES[engine].values("zero_stage") if engine in CAPABILITIES else (2,)
    return 2 if 2 in stages else int(stages[0])


def _check_ranks(engine: str, comm: Communicator) -> None:
    # the libraries below the other engines communicate over the default process group
    everyone = dist.get_world_size() if dist.is_initialized() else 1
    if engine != "native" and comm.world_size != everyone:
        raise ConfigError(
            f"engine={engine} trains with all ranks of the process group, {everyone}, and got a communicator of "
            f"{comm.world_size}; use engine=native for a subset of them"
        )


def resolve_policy(
    engine: str,
    policy: PrecisionPolicy,
    device: torch.device,
    *,
    zero_stage: int,
    reproducible: bool,
    reduce_dtype: str,
) -> PrecisionPolicy:
    """Returns the policy resolved for ``device`` and ``engine``, with the dtype of gradients during reduction.

    Raises:
        ConfigError: ``device`` cannot compute in it, the engine does not support it, or reduction would lose precision
            or range for nothing.
    """
    every_micro_batch = STAGES[zero_stage].reduces_every_micro_batch(reproducible=reproducible)
    policy = policy.on(device).reducing(
        reduce_dtype, reduces_every_micro_batch=engine == "native" and every_micro_batch
    )
    assert policy.reduce_dtype is not None
    settings: dict[str, Any] = {"device_type": device.type, "reduce_dtype": format_name(policy.reduce_dtype)}
    if policy.name in SETTINGS["precision"]:
        settings["precision"] = policy.name
    check(engine, **settings)
    return policy


def _with_decisions(given: Contract, model: nn.Module, comm: Communicator, *, casts_each_time: bool) -> Contract:
    """Returns ``given`` with all FP8 products decided: as in earlier decisions, else by rank 0 for all ranks."""
    policy = given.policy
    # a resumed run keeps its decisions: new timings could choose other products, and with them other bits
    before = {decision.name: decision for decision in policy.decisions}
    candidates = float8_candidates(policy, model)
    kept = [before[product.name] for product in candidates if product.name in before]
    products = [product for product in candidates if product.name not in before]
    decisions = []
    if products:
        decisions = on_rank_0(
            comm,
            "choosing the FP8 products",
            lambda: [
                asdict(decision)
                for decision in decide_float8(products, policy.float8, comm.device, casts_each_time=casts_each_time)
            ],
            ConfigError,
            expected=(ConfigError,),
        )
    return resolve(policy, model, given.weights, kept + [Float8Decision(**decision) for decision in decisions])


def _rank_device(model: nn.Module) -> torch.device:
    """Returns the model's GPU if it has one, the CPU if the process group uses gloo, else this rank's own GPU."""
    found = next((p.device for p in model.parameters() if p.device.type == "cuda"), None)
    if found is not None:
        return found
    if dist.is_initialized() and dist.get_backend() == "gloo":
        return torch.device("cpu")
    return choose_device("auto", LaunchEnv.read().local_rank)


def _check_arguments(
    engine: str, options: StepOptions, engine_options: EngineOptions, policy: PrecisionPolicy, reduce_dtype: str
) -> None:
    """Checks what does not depend on the device and the other ranks."""
    stage, grad_reduction = options.zero_stage, engine_options.grad_reduction
    settings: dict[str, Any] = {
        "zero_stage": stage,
        "reproducible": options.reproducible,
        "reduce_dtype": reduce_dtype,
        "compile": options.optimizer.compile,
        "offload": engine_options.offload,
        "groups": engine_options.groups if isinstance(engine_options.groups, str) else tuple(engine_options.groups),
        "grad_reduction": grad_reduction,
        "reshard_after_forward": engine_options.unshard.reshard_after_forward,
        "prefetch": engine_options.unshard.prefetch,
        "keep_gathered": engine_options.unshard.keep_gathered,
    }
    if policy.name in SETTINGS["precision"]:
        settings["precision"] = policy.name
    for name in dict.fromkeys(("fp32", *(name for _, name in policy.rules))):
        check(engine, **settings, rules=name)
    if grad_reduction != "auto" and stage != 1:
        raise ConfigError(f"grad_reduction={grad_reduction} concerns zero_stage=1 only; got zero_stage={stage}")
    if grad_reduction != "auto" and options.reproducible:
        raise ConfigError(
            f"grad_reduction={grad_reduction} has no effect with reproducible=True, which sums at the owner"
        )
    if stage != 3 and engine_options.unshard != UnshardOptions():
        raise ConfigError(
            f"reshard_after_forward, prefetch and keep_gathered concern zero_stage=3 only; got zero_stage={stage}"
        )
    if options.max_grad_norm is not None and not options.max_grad_norm > 0:
        raise ConfigError(f"max_grad_norm must be above 0, or None for no clipping; got {options.max_grad_norm}")
    if not is_dataclass(options.schedule):
        raise ConfigError(
            f"the schedule is {type(options.schedule).__name__}, whose values the ranks cannot compare; make it a "
            f"frozen dataclass, its numbers as fields, with a method factor(step)"
        )


def _require_reproducible(model: nn.Module) -> None:
    for name, module in model.named_modules():
        tracks = isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
        if tracks and module.training:
            raise ConfigError(
                f"reproducible=True cannot hold with '{name}' ({type(module).__name__}): its running statistics "
                f"depend on which micro-batches a rank sees; use GroupNorm or LayerNorm"
            )


def _use_deterministic_kernels(device: torch.device) -> None:
    # torch reads it once, in the first product on a GPU, and refuses products ever after if it is not set
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # on by default with deterministic algorithms: it would write every new tensor once more
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False  # it may choose another kernel in each process
    _require_deterministic_products(device)


def _require_deterministic_products(device: torch.device) -> None:
    square = torch.zeros(2, 2, device=device)
    try:
        torch.mm(square, square)
    except RuntimeError as error:
        if "CUBLAS_WORKSPACE_CONFIG" not in str(error):
            raise
        torch.use_deterministic_algorithms(False)
        raise ConfigError(
            "reproducible=True: this process has multiplied matrices on a GPU before; CUBLAS_WORKSPACE_CONFIG, which "
            "torch reads only then, was neither :4096:8 nor :16:8. Set it in the environment of the process"
        ) from error


def _agree_on_identity(comm: Communicator, seed: int | None) -> RunIdentity:
    own = torch.initial_seed() % (1 << 63) if seed is None else seed
    proposal = [uuid.uuid4().hex, own, seed is not None]
    proposals = [json.loads(text) for text in comm.exchange_text(json.dumps(proposal))]
    run_id, agreed, _ = proposals[0]
    for rank, (_, other, given) in enumerate(proposals):
        if given and other != agreed:
            raise DivergenceError(f"seed is {agreed} on rank 0 and {other} on rank {rank}; give all ranks the same")
    return RunIdentity(run_id, agreed)


def _config_text(
    engine: str,
    model: nn.Module,
    contract: Contract,
    options: StepOptions,
    engine_options: EngineOptions,
    rule: LossScale,
) -> str:
    """Returns everything that must be equal on all ranks, as canonical JSON.

    Raises:
        ConfigError: a value is not plain JSON, so equal values could have different texts.
    """
    content: dict[str, Any] = {
        "engine": engine,
        "options": asdict(options),
        "schedule": type(options.schedule).__name__,  # asdict leaves out the class, which has the formula
        "loss_scale": asdict(rule),
        "engine_options": asdict(engine_options),
        "contract": contract.to_dict(),
        "shapes": {name: list(p.shape) for name, p in model.named_parameters()},
        "trainable": {name: p.requires_grad for name, p in model.named_parameters()},
        "versions": {"torch": str(torch.__version__)},
        # kernels split their sums by threads, so reproducible ranks need the same number
        "threads": torch.get_num_threads() if options.reproducible else None,
    }
    try:
        return json.dumps(content, sort_keys=True)
    except TypeError as error:
        raise ConfigError(
            f"the fields of the optimizer and of the schedule must be numbers, strings, or lists of them, so that the "
            f"ranks can compare them ({error})"
        ) from None


def _require_equal_configs(comm: Communicator, config_text: str) -> None:
    """Compares configurations before anything else is sent: models of different shapes would hang the broadcast."""
    # the texts are long, so they are exchanged only to name a difference
    digests = comm.exchange_text(hashlib.sha256(config_text.encode()).hexdigest())
    rank = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if rank is not None:
        texts = [json.loads(text) for text in comm.exchange_text(config_text)]
        difference = config_difference(texts[0], texts[rank], rank)
        raise DivergenceError(f"the ranks were set up differently: {difference}")


def _broadcast_model(model: nn.Module, comm: Communicator) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        value = tensor.detach().contiguous()
        comm.broadcast(value, label=name)
        if value.data_ptr() != tensor.data_ptr():  # it was not contiguous, so a copy was broadcast
            tensor.detach().copy_(value)


def _cast_frozen(model: nn.Module, contract: Contract) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(contract.replica_dtypes[name])
