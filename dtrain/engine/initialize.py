"""``dtrain.initialize``: from a model and a few records to an engine."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from dtrain.distributed.collectives import Communicator
from dtrain.distributed.logging import logger
from dtrain.distributed.setup import LaunchEnv, choose_device, connect
from dtrain.engine.base import Engine
from dtrain.engine.divergence import config_difference
from dtrain.engine.native import NativeEngine, NativeOptions, RunIdentity
from dtrain.errors import ConfigError, DivergenceError, ModelError, nearest
from dtrain.optim.adamw import AdamW
from dtrain.optim.schedule import Constant, Schedule
from dtrain.precision.forward import set_matmul_precision
from dtrain.precision.loss_scale import LossScale
from dtrain.precision.policy import Contract, PrecisionPolicy, check_trainable
from dtrain.sharding.gather import GatherOptions
from dtrain.sharding.placement import STAGES
from dtrain.sharding.state import ShardedState

ENGINES = ("native",)
_UNDER_ENGINE: WeakSet[nn.Module] = WeakSet()


def initialize(
    model: nn.Module,
    *,
    optimizer: AdamW | None = None,
    schedule: Schedule | None = None,
    engine: str = "native",
    zero_stage: int = 2,
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
    max_consecutive_skips: int = 50,
    seed: int | None = None,
    comm: Communicator | None = None,
) -> Engine:
    """Puts ``model`` under an engine; every rank calls it with the same arguments.

    The model's trainable parameters become views of the engine's compute replicas, in place. Rank 0's weights and
    buffers are broadcast. The process group that exists is used; where none does, one is made from the launcher's
    environment, and a single rank needs none.

    Args:
        model: any ``nn.Module`` with values (not on ``meta``); it is moved to the rank's device.
        optimizer: AdamW's hyper-parameters; ``AdamW()`` by default.
        schedule: learning rate by applied steps; constant by default.
        engine: ``native``.
        zero_stage: 0 to 3: what of replicas, gradients, masters and moments is sharded. At stage 3 a forward is a
            collective: all ranks run the same modules in the same order, in :meth:`Engine.eval` too.
        precision: ``auto``, ``fp32``, ``tf32``, ``bf16``, ``fp16``, or a policy.
        loss_scale: ``auto`` (dynamic for FP16, else none), ``none``, ``dynamic``, a number, or a record.
        max_grad_norm: clipping threshold of the global norm; None clips nothing.
        groups: units of sharding: ``auto`` (each element of a ModuleList or Sequential) or module-name patterns.
        reproducible: canonical sums, keyed RNG and deterministic kernels: equal bits at any world size and stage.
        grad_reduction: ``auto`` (reduce_scatter), ``all_reduce`` or ``reduce_scatter``; concerns stage 1 only.
        reduce_dtype: of gradients on the wire, whose replica has the compute dtype: ``fp32``, ``bf16`` or ``fp16``.
            ``auto``: each micro-batch's gradients travel as they are (stages 2 and 3, reproducible), and FP32 sums of
            them in FP32 (stages 0 and 1). Sums over ranks are FP32 always.
        reshard_after_forward: free a group after its forward, else after its backward; concerns stage 3 only.
        prefetch: groups gathered ahead of their use; stage 3 only.
        keep_gathered: name patterns of modules and parameters that are gathered for the whole forward and backward,
            because something outside their group reads them; stage 3 only.
        max_consecutive_skips: skipped steps in a row that end the run.
        seed: of dropout and the like; None takes rank 0's ``torch.initial_seed()``.
        comm: the ranks to train with; None makes or finds the process group.

    Raises:
        ConfigError: a value that cannot be honoured.
        ModelError: a parameter that cannot be trained.
        DivergenceError: the ranks were given different arguments or models.
    """
    gather = GatherOptions(reshard_after_forward, prefetch, tuple(keep_gathered))
    _check_arguments(engine, zero_stage, grad_reduction, reproducible, max_grad_norm)
    if zero_stage != 3 and gather != GatherOptions():
        raise ConfigError(
            f"reshard_after_forward, prefetch and keep_gathered concern zero_stage=3 only; got zero_stage={zero_stage}"
        )
    _check_schedule(schedule)
    policy = precision if isinstance(precision, PrecisionPolicy) else PrecisionPolicy.named(precision)
    rule = LossScale.of(loss_scale)
    if model in _UNDER_ENGINE:
        raise ModelError("this model is under an engine already; go on with that engine, or build the model anew")
    check_trainable(model)
    if reproducible:
        _require_reproducible(model)
    if comm is None:
        device = _rank_device(model)
        policy = policy.on(device)
        comm = connect(device)
    leaves_travel = STAGES[zero_stage].leaves_travel(reproducible=reproducible)
    policy = policy.on(comm.device).reducing(reduce_dtype, leaves_travel=leaves_travel)
    model.to(comm.device)
    contract = policy.resolve(model)
    options = NativeOptions(
        (optimizer or AdamW()).on(comm.device),
        schedule or Constant(),
        max_grad_norm,
        zero_stage,
        reproducible,
        max_consecutive_skips,
    )
    rule = rule.resolved(policy.compute_dtype)
    identity = _agree_on_identity(comm, seed)
    config_text = _config_text(model, contract, options, rule, grad_reduction, groups, gather)
    _require_equal_configs(comm, config_text)
    if reproducible:
        _use_deterministic_kernels()
    set_matmul_precision(policy)
    _broadcast_model(model, comm)
    state = ShardedState(
        model,
        contract,
        STAGES[zero_stage],
        comm,
        groups=groups,
        reproducible=reproducible,
        all_reduce=grad_reduction == "all_reduce",
        gather=gather,
    )
    _cast_frozen(model, contract)
    _UNDER_ENGINE.add(model)
    built = NativeEngine(model, contract, state, comm, options, rule.start(), identity, config_text)
    for line in contract.describe():
        logger.info(line)
    return built


def _rank_device(model: nn.Module) -> torch.device:
    """Where the model is if that is a GPU; the CPU where the process group speaks gloo; else this rank's own GPU."""
    found = next((p.device for p in model.parameters() if p.device.type == "cuda"), None)
    if found is not None:
        return found
    if dist.is_initialized() and dist.get_backend() == "gloo":
        return torch.device("cpu")
    return choose_device("auto", LaunchEnv.read().local_rank)


def _check_arguments(
    engine: str, zero_stage: int, grad_reduction: str, reproducible: bool, max_grad_norm: float | None
) -> None:
    if engine not in ENGINES:
        raise ConfigError(f"engine '{engine}' is not one of {', '.join(ENGINES)}{nearest(engine, ENGINES)}")
    if zero_stage not in STAGES:
        raise ConfigError(f"zero_stage={zero_stage} is not one of {', '.join(map(str, STAGES))}")
    reductions = ("auto", "all_reduce", "reduce_scatter")
    if grad_reduction not in reductions:
        raise ConfigError(f"grad_reduction '{grad_reduction}' is not one of {', '.join(reductions)}")
    if grad_reduction != "auto" and zero_stage != 1:
        raise ConfigError(f"grad_reduction={grad_reduction} concerns zero_stage=1 only; got zero_stage={zero_stage}")
    if grad_reduction != "auto" and reproducible:
        raise ConfigError(
            f"grad_reduction={grad_reduction} has no effect with reproducible=True, which sums at the owner"
        )
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ConfigError(f"max_grad_norm must be above 0, or None for no clipping; got {max_grad_norm}")


def _check_schedule(schedule: Schedule | None) -> None:
    if schedule is not None and not is_dataclass(schedule):
        raise ConfigError(
            f"the schedule is {type(schedule).__name__}, whose values the ranks cannot compare; make it a frozen "
            f"dataclass, its numbers as fields, with a method factor(step)"
        )


def _require_reproducible(model: nn.Module) -> None:
    for name, module in model.named_modules():
        tracks = isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
        if tracks and module.training:
            raise ConfigError(
                f"reproducible=True cannot hold with '{name}' ({type(module).__name__}): its running statistics "
                f"depend on which micro-batches a rank sees; use GroupNorm or LayerNorm"
            )


def _use_deterministic_kernels() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def _agree_on_identity(comm: Communicator, seed: int | None) -> RunIdentity:
    own = torch.initial_seed() % (1 << 63) if seed is None else seed
    word = [uuid.uuid4().hex, own, seed is not None, comm.may_share]
    words = [json.loads(text) for text in comm.exchange_text(json.dumps(word))]
    run_id, agreed, _, shares = words[0]
    for rank, (_, other, given, may_share) in enumerate(words):
        if may_share != shares:
            raise DivergenceError(
                f"shared memory between ranks is allowed: {shares} on rank 0, {may_share} on rank {rank}; give all "
                f"ranks the same"
            )
        if given and other != agreed:
            raise DivergenceError(f"seed is {agreed} on rank 0 and {other} on rank {rank}; give all ranks the same")
    return RunIdentity(run_id, agreed)


def _config_text(
    model: nn.Module,
    contract: Contract,
    options: NativeOptions,
    rule: LossScale,
    grad_reduction: str,
    groups: str | Sequence[str],
    gather: GatherOptions,
) -> str:
    """Everything that must be equal on all ranks, as canonical JSON.

    Raises:
        ConfigError: a value that is not plain JSON, so that its text may differ where the value does not.
    """
    content: dict[str, Any] = {
        "options": asdict(options),
        "schedule": type(options.schedule).__name__,
        "loss_scale": asdict(rule),
        "grad_reduction": grad_reduction,
        "groups": groups if isinstance(groups, str) else list(groups),
        "gather": asdict(gather),
        "contract": contract.to_dict(),
        "shapes": {name: list(p.shape) for name, p in model.named_parameters()},
        "trainable": {name: p.requires_grad for name, p in model.named_parameters()},
        "versions": {"torch": str(torch.__version__)},
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
    """Compares before anything else is sent: models of different shapes would hang the broadcast."""
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
        if value.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(value)


def _cast_frozen(model: nn.Module, contract: Contract) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(contract.replica_dtypes[name])
