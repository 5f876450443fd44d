"""``dtrain.initialize``: builds an engine from a model and a few records."""

from __future__ import annotations

import hashlib
import json
import uuid
from dataclasses import asdict, replace
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import current_flash_attention_impl

from dtrain.checkpoint.frozen_source import FrozenSource
from dtrain.config.audit import Audit
from dtrain.config.blocks import Blocks
from dtrain.config.capabilities import CAPABILITIES, SETTINGS, check
from dtrain.config.engines import EngineConfig
from dtrain.config.optim import Optimizer
from dtrain.config.precision import LossScale
from dtrain.config.schedule import AnySchedule
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.consensus import on_rank_0
from dtrain.distributed.logging import logger
from dtrain.distributed.mesh import Mesh
from dtrain.distributed.startup.setup import choose_device, connect, read_launch_env
from dtrain.engine.blocks.compiled import resolve_compile
from dtrain.engine.blocks.install import find_blocks
from dtrain.engine.deterministic import allow_deterministic_kernels, require_reproducible, use_deterministic_kernels
from dtrain.engine.interface import Engine
from dtrain.engine.request import EngineRequest, RunIdentity, StepOptions
from dtrain.engine.settings import (
    audit_record,
    blocks_record,
    check_model,
    check_others,
    check_precision,
    checked_ema_decay,
    checked_missing_grad,
    checked_threshold,
    engine_record,
    optimizer_record,
    schedule_record,
)
from dtrain.engine.vote.divergence import config_difference, texts_of
from dtrain.errors import ConfigError, DivergenceError
from dtrain.optim.rules import on_device
from dtrain.parameters.optimizer_plan import OptimizerPlan, plan_optimizer
from dtrain.precision.contract import Contract, StateFormats, float8_candidates, resolve
from dtrain.precision.float8.cast import E4M3
from dtrain.precision.float8.choice import Float8Decision, decide_float8
from dtrain.precision.forward import set_matmul_precision
from dtrain.precision.loss_scale import LossScaleState, resolve_loss_scale
from dtrain.precision.policy import PrecisionPolicy
from dtrain.precision.rules import format_name
from dtrain.sharding.placement import STAGES


def initialize(
    model: nn.Module,
    *,
    optimizer: Optimizer | None = None,
    schedule: AnySchedule | None = None,
    engine: str | EngineConfig = "native",
    precision: str | torch.dtype | PrecisionPolicy = "auto",
    loss_scale: str | float | LossScale = "auto",
    max_grad_norm: float | None = 1.0,
    ema_decay: float | None = None,
    missing_grad: str = "skip",
    audit: Audit | int | None = None,
    blocks: Blocks | None = None,
    seed: int | None = None,
    comm: Communicator | None = None,
    frozen_source: FrozenSource | None = None,
    **engine_settings: Any,
) -> Engine:
    """Returns an engine that trains ``model``; every rank calls it with the same arguments.

    The engine manages the model's trainable parameters from then on, in place: they become its compute weights. Rank
    0's weights and buffers are broadcast. An option that an engine does not support is refused with the reason
    (docs/reference/engines.md). An existing process group is used; else one is created from the launcher's
    environment. A single rank needs none.

    Args:
        model: any ``nn.Module`` with values (not on ``meta``); it is moved to the rank's device.
        optimizer: a record such as ``dtrain.AdamW(lr=3e-4)``, ``SGD``, ``Lion``, ``Muon`` or ``TorchOptimizer``;
            ``AdamW()`` by default.
        schedule: learning rate by applied steps; constant by default.
        engine: a record, such as ``dtrain.Native(zero_stage=3)``, or its name: ``native``, ``fsdp2``, ``deepspeed`` or
            ``ddp``. At stage 3, and with ``fsdp2``, a forward is a collective: all ranks run the same modules in the
            same order, in ``Engine.eval`` too.
        precision: ``auto``, ``fp32``, ``tf32``, ``bf16``, ``fp16``, ``fp8``, a torch dtype, or a policy, which may have
            rules.
        loss_scale: ``auto`` (dynamic if anything is FP16, else none), ``none``, ``dynamic``, ``calibrated``, a
            number, or a record.
        max_grad_norm: clipping threshold of the global norm; None clips nothing.
        ema_decay: decay of an exponential moving average of the weights, such as 0.999 (``Engine.ema``); None keeps
            none.
        missing_grad: what happens to a parameter that no micro-batch of any rank gives a gradient in a step: ``skip``
            leaves its weights, optimizer states and average alone, as torch's optimizers do; ``zero`` updates it with
            a gradient of zero, so it decays, and its old moments move it.
        audit: how often the bits of weights and optimizer states are checked: ``dtrain.Audit(every=100)``, which is
            the default, or the number of steps; 0 for none. See docs/trust/audit.md.
        blocks: ``dtrain.Blocks(recompute="selective", compile="blocks")``: recompute the activations of the model's
            blocks in backward, compile the blocks; None does neither. See docs/scale/engine.md.
        seed: of dropout and other random numbers; None takes rank 0's ``torch.initial_seed()``.
        comm: the ranks to train with; None finds or creates the process group.
        frozen_source: ``dtrain.FrozenSource(folder)``, if all frozen parameters are those of a folder of safetensors
            files: checkpoints name it by its SHA-256 and hold none of them. None: they are saved in each checkpoint.
        **engine_settings: fields of the engine's record, if ``engine`` is a name: ``zero_stage``, ``reproducible``,
            ``sharding_units``, ``reduce_dtype``, ...; docs/reference/keys.md says what each means, as ``engine.*``.

    Raises:
        ConfigError: a value that cannot be honored.
        ModelError: a parameter that cannot be trained.
        DivergenceError: the ranks were given different arguments or models.

    Examples:
        >>> engine = dtrain.initialize(torch.nn.Linear(4, 1), optimizer=dtrain.AdamW(lr=3e-4), precision="bf16")
        >>> engine.backward(engine(torch.ones(2, 4)).square().mean())
        >>> engine.step().applied, engine.module.weight.dtype
        (True, torch.bfloat16)
    """
    # first what needs no other rank: a mistake is reported before a process group is created
    record, policy = engine_record(engine, engine_settings), PrecisionPolicy.of(precision)
    max_grad_norm = checked_threshold(max_grad_norm)
    missing_grad = checked_missing_grad(missing_grad)
    ema_decay = checked_ema_decay(ema_decay)
    audits = audit_record(audit)
    optimizer = optimizer_record(optimizer)
    schedule = schedule_record(schedule, optimizer.lr)
    blocks = blocks_record(blocks)
    options = StepOptions(record, optimizer, schedule, max_grad_norm, ema_decay, audits, blocks, missing_grad)
    check_precision(options, policy)
    rule = LossScale.of(loss_scale)
    check_others(seed, comm, frozen_source)
    check_model(model)
    find_blocks(model, options.blocks)
    if record.reproducible:
        require_reproducible(model)
    device = _rank_device(model) if comm is None else comm.device
    options = replace(options, blocks=replace(options.blocks, compile=resolve_compile(options.blocks.compile, device)))
    # of masters and optimizer states, which decides how they are updated
    state_device = torch.device("cpu") if record.offload == "cpu" else device
    plan = plan_optimizer(model, on_device(options.optimizer, state_device), state_device, ema_decay)
    if comm is None:
        policy = policy.on(device)
        comm = connect(device)
    _check_ranks(record, comm)
    policy = resolve_policy(record, policy, comm.device)
    if any(tensor.device != comm.device for tensor in (*model.parameters(), *model.buffers())):
        model.to(comm.device)
    options = replace(options, optimizer=on_device(options.optimizer, state_device))
    identity = _agree_on_identity(comm, seed)
    capabilities = CAPABILITIES[record.name]
    undecided = replace(
        resolve(policy, model, capabilities.held, policy.decisions), states=_state_formats(record, plan)
    )
    rule = resolve_loss_scale(rule, torch.float16 if undecided.needs_loss_scale else policy.compute_dtype)
    # before rank 0 decides for all: it times products of its own model, which must be that of all ranks
    _require_equal_configs(comm, _config_text(model, undecided, options, rule, frozen_source))
    if record.reproducible:
        use_deterministic_kernels(comm.device)  # before the first product, which may be one that is timed below
    elif audits.replay_every:
        allow_deterministic_kernels(comm.device)
    frozen_source = frozen_source and frozen_source.hashed(comm)
    contract = _with_decisions(undecided, model, comm, casts_each_time=capabilities.casts_each_time)
    record.check_exclusions(  # such as with precision=auto on an older GPU, or after rules
        precision=policy.name,
        has_bf16_weights=torch.bfloat16 in {contract.replica_dtypes[name] for name in plan.numbers},
        has_bf16_gradients=torch.bfloat16 in {contract.parameter_dtype(name) for name in plan.numbers},
    )
    config_text = _config_text(model, contract, options, rule, frozen_source)
    set_matmul_precision(policy)
    # before anything is cast: masters take the unrounded values
    _broadcast_model(model, comm)
    _cast_frozen(model, contract)
    scale = LossScaleState.of(rule)
    mesh = Mesh.of(comm, record.shard_size)
    request = EngineRequest(model, contract, plan, mesh, options, scale, identity, config_text, frozen_source)
    # imported by name, because the libraries of the other engines need not be installed
    built: Engine = import_module(f"dtrain.engine.adapters.{record.name}").build(request)
    built.guard_reads()
    if comm.device.type == "cpu":
        _keep_freed_memory()
    for line in built.contract.describe():
        logger.info(line)
    if mesh.is_hybrid and comm.rank == 0:
        logger.info(mesh.describe())
    if comm.rank == 0 and (warning := underflow_warning(contract, rule)):
        logger.warning(warning)
    return built


def _keep_freed_memory() -> None:
    """Lets glibc's malloc keep memory that a step frees for the next step, if it is at the top of the heap.

    Else each step pays page faults. When a mapped block is freed, malloc raises its thresholds: smaller blocks come
    from the heap, which keeps twice the block's size (mallopt(3), M_MMAP_THRESHOLD); no block above 32 MiB counts. It
    is called after an engine is built, because what building it frees should go back.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


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


def _check_ranks(engine: EngineConfig, comm: Communicator) -> None:
    engine.check_ranks(comm.world_size)
    everyone = dist.get_world_size() if dist.is_initialized() else 1
    if engine.uses_default_process_group and comm.world_size != everyone:
        raise ConfigError(
            f"engine={engine.name} trains with all ranks of the process group, {everyone}, and got a communicator of "
            f"{comm.world_size}; use engine=native for a subset of them"
        )


def resolve_policy(engine: EngineConfig, policy: PrecisionPolicy, device: torch.device) -> PrecisionPolicy:
    """Returns the policy resolved for ``device`` and ``engine``, with the dtype of gradients during reduction.

    Raises:
        ConfigError: ``device`` cannot compute in it, the engine does not support it, or reduction would lose precision
            or range for nothing.
    """
    if policy.reduce_dtype is not None and engine.reduce_dtype == "auto":
        engine = replace(engine, reduce_dtype=format_name(policy.reduce_dtype))  # which checks it
    every_micro_batch = STAGES[engine.zero_stage].reduces_every_micro_batch(
        reproducible=engine.reproducible, grad_dtype=engine.grad_dtype
    )
    every_micro_batch |= engine.offload == "cpu" and device.type != "cpu"
    every_micro_batch &= CAPABILITIES[engine.name].supports("reduce_dtype", "bf16")  # else it sends in FP32
    policy = policy.on(device).reducing(engine.reduce_dtype, reduces_every_micro_batch=every_micro_batch)
    if policy.name in SETTINGS["precision"]:
        check(engine.name, precision=policy.name, device_type=device.type)
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
    decided = kept + [Float8Decision(**decision | {"products": tuple(decision["products"])}) for decision in decisions]
    return replace(resolve(policy, model, given.weights, decided), states=given.states)


def _state_formats(engine: EngineConfig, plan: OptimizerPlan) -> StateFormats:
    narrowest = min((spec.dtype for spec in plan.specs.values()), key=lambda d: d.itemsize, default=torch.float32)
    return StateFormats(engine.master, engine.grad_dtype, format_name(narrowest))


def _rank_device(model: nn.Module) -> torch.device:
    """Returns the model's GPU if it has one, the CPU if the process group uses gloo, else this rank's own GPU."""
    found = next((p.device for p in model.parameters() if p.device.type == "cuda"), None)
    if found is not None:
        return found
    if dist.is_initialized() and dist.get_backend() == "gloo":
        return torch.device("cpu")
    return choose_device("auto", read_launch_env().local_rank)


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
    model: nn.Module, contract: Contract, options: StepOptions, rule: LossScale, source: FrozenSource | None
) -> str:
    """Returns everything that must be equal on all ranks, as canonical JSON.

    Raises:
        ConfigError: a value is not plain JSON, so equal values could have different texts.
    """
    content: dict[str, Any] = {
        "options": asdict(options),
        "schedule": type(options.schedule).__name__,  # asdict leaves out the class, which has the formula
        "loss_scale": asdict(rule),
        "contract": contract.to_dict(),
        "shadow_every": contract.policy.float8.shadow_every,
        "frozen_source": source is not None,  # its path may differ between hosts
        # with their order, dtypes and buffers: the broadcast of the weights would fill memory of another size or type
        "parameters": {
            name: {**_tensor_fields(position, p), "trainable": p.requires_grad}
            for position, (name, p) in enumerate(model.named_parameters())
        },
        "buffers": {name: _tensor_fields(position, b) for position, (name, b) in enumerate(model.named_buffers())},
        "modules": {name: _module_text(module) for name, module in model.named_modules()},
        "versions": {"torch": str(torch.__version__), "flash_attention": current_flash_attention_impl()},
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


def _tensor_fields(position: int, tensor: Tensor) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"position": position, "shape": list(tensor.shape), "dtype": dtype}


def _module_text(module: nn.Module) -> str:
    """Returns the class of a module; of one of torch's also its options, which no parameter may show."""
    kind = type(module)
    return f"{kind.__qualname__}({module.extra_repr() if kind.__module__.startswith('torch.nn.') else ''})"


def _require_equal_configs(comm: Communicator, config_text: str) -> None:
    """Compares configurations before anything else is sent: models of different shapes would hang the broadcast."""
    # the texts are long, so they are exchanged only to name a difference
    digests = comm.exchange_text(hashlib.sha256(config_text.encode()).hexdigest())
    rank = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if rank is not None:
        expected, got = map(json.loads, texts_of(comm, config_text, rank))
        difference = config_difference(expected, got, rank)
        raise DivergenceError(f"the ranks were set up differently: {difference}")


def _broadcast_model(model: nn.Module, comm: Communicator) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        value = tensor.detach().contiguous()
        comm.broadcast(value, label=name)
        if value.data_ptr() != tensor.data_ptr():  # it was not contiguous, so a copy was broadcast
            tensor.detach().copy_(value)


def _cast_frozen(model: nn.Module, contract: Contract) -> None:
    for name, parameter in model.named_parameters():
        dtype = contract.replica_dtypes[name]
        if not parameter.requires_grad and dtype != E4M3:  # which needs scales
            parameter.data = parameter.data.to(dtype)
