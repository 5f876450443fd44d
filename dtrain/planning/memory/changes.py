"""Changes of a configuration that make a run fit into the memory of its device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from dtrain.config.engines import settings_of
from dtrain.config.model import DEFAULT_FACTORY, GPT2_FACTORY, HF_FACTORY
from dtrain.config.optim import OPTIM_KEYS, AdamW, OptimKeys
from dtrain.engine.adapters.native import NativeEngine
from dtrain.errors import ConfigError
from dtrain.planning.memory.plan import FITS, MemoryPlan, plan_memory, saved_copy
from dtrain.planning.memory.step_memory import PER_SAMPLE, StepMemory
from dtrain.planning.planned_run import PlannedRun, saved_bytes, split_memory
from dtrain.planning.record.recorder import UNSHARDED
from dtrain.sharding.states import TRANSFER

_NUM_CHANGES = 3

_Apply = Callable[[PlannedRun], PlannedRun]


@dataclass(frozen=True)
class Change:
    """A change of the configuration that saves memory.

    Attributes:
        keys: what to add to the command line.
        cost: what it costs.
        plan: the memory with it: the states exactly, the rest in proportion; all exactly for another precision, and
            for recomputation.
    """

    keys: str
    cost: str
    plan: MemoryPlan


def cheapest_changes(run: PlannedRun, plan: MemoryPlan) -> list[Change]:
    """Returns the three cheapest changes each of which makes ``run`` fit.

    If none does, the changes are added to each other until the run fits, and the last entry has all of them.
    """
    fitting: list[Change] = []
    useful: list[tuple[str, str, _Apply]] = []
    for keys, cost, apply in _candidates(run, plan):
        with suppress(ConfigError):  # one that this configuration cannot have
            estimated = _estimate(run, plan, apply(run))
            if estimated.high < plan.high:
                useful.append((keys, cost, apply))
                fitting += [Change(keys, cost, estimated)] if estimated.fit == FITS else []
        if len(fitting) == _NUM_CHANGES:  # some of the others take a plan of their own, which takes seconds
            break
    return fitting or _together(run, plan, useful)


def _together(run: PlannedRun, plan: MemoryPlan, candidates: list[tuple[str, str, _Apply]]) -> list[Change]:
    chosen: dict[str, tuple[str, str]] = {}  # the last value of each key, and its cost
    changes: list[Change] = []
    for key, cost, apply in candidates:
        with suppress(ConfigError):
            changed = apply(run)
            plan, run = _estimate(run, plan, changed), changed
            chosen.pop(key.partition("=")[0], None)
            chosen[key.partition("=")[0]] = key, cost
            keys, costs = zip(*chosen.values(), strict=True)
            changes.append(Change(" ".join(keys), "; ".join(costs), plan))
            if plan.fit == FITS:
                break
    return changes[-_NUM_CHANGES:]


def _estimate(base: PlannedRun, plan: MemoryPlan, run: PlannedRun) -> MemoryPlan:
    """Returns the memory of ``run``: its own states, and the rest of ``plan``, which is that of ``base``."""
    if (run.config.precision, run.config.model) != (base.config.precision, base.config.model):  # other activations
        return plan_memory(run)
    with run.engine() as (engine, _):
        states, host = split_memory(engine)
        copy, unsharded = saved_copy(run, saved_bytes(engine)[0]), _unsharded_bytes(engine)
        if engine.sharded.reducer.exchange is not None:  # a ring is there from the start, other buffers are not
            states["unreduced_grad"] = max(states["unreduced_grad"], engine.sharded.reducer.exchange.max_nbytes())
        if engine.sharded.offload is not None:
            states[TRANSFER] = engine.sharded.offload.max_device_nbytes(run.num_ranks)
    factor = run.config.train.micro_batch_size / base.config.train.micro_batch_size
    others = {kind: nbytes for kind, nbytes in plan.step.peak.items() if kind not in plan.step.states}
    scaled = {kind: int(nbytes * factor) if kind in PER_SAMPLE else nbytes for kind, nbytes in others.items()}
    peak = {**states, **scaled, UNSHARDED: unsharded}
    total = sum(peak.values())
    low, high = (total * nbytes // plan.step.total for nbytes in plan.step.fragments)
    step = StepMemory(
        states, peak, first=total, largest=int(plan.step.largest * factor), fragments=(low, high), host=host
    )
    return MemoryPlan(run.device, run.num_ranks, step, copy)


def _unsharded_bytes(engine: NativeEngine) -> int:
    """Returns the bytes of full weights at a time: those of the root group and of the largest other groups."""
    sizes = {
        group.name: sum(r.layout.numel * r.layout.dtype.itemsize * r.views.num_copies for r in group.replicas)
        for group in engine.sharded.groups
        if any(replica.is_sharded for replica in group.replicas)
    }
    root = sizes.pop("", 0)
    options = engine.options.engine.as_native()
    count = 1 + options.prefetch if options.reshard_after_forward else len(sizes)
    return root + sum(sorted(sizes.values())[-count:])


def _candidates(run: PlannedRun, plan: MemoryPlan) -> Iterator[tuple[str, str, _Apply]]:
    """Yields keys, cost and effect of each change, the cheapest first."""
    config = run.config
    engine, train = config.engine, config.train
    if engine.reproducible:
        yield _change("engine.reproducible", False, "bits that depend on the number of ranks")
    if not engine.as_native().reshard_after_forward:
        yield _change("engine.reshard_after_forward", True, "weights are gathered twice a micro-batch")
    if run.num_ranks > 1:
        for stage in range(engine.zero_stage + 1, 3):
            cost = "gradients are sent in each micro-batch" if stage == 2 else "nothing"
            yield _change("engine.zero_stage", stage, cost)
    if run.device.type == "cpu" and config.checkpoint.asynchronous:
        yield _change("checkpoint.asynchronous", False, "a save stops training")
    model = config.model
    if model.loss_chunk == "none" and model.factory in (DEFAULT_FACTORY, GPT2_FACTORY, HF_FACTORY):
        yield _change("model.loss_chunk", "auto", "training returns no logits")
    sizes = [size for size in range(train.micro_batch_size // 2, 0, -1) if train.micro_batch_size % size == 0]
    for size in sizes:
        if size == 1 or plan.can_hold(plan.tensors - (1 - size / train.micro_batch_size) * plan.step.growing):
            cost = f"{train.micro_batch_size // size} times as many forwards, of smaller products"
            smaller = partial(PlannedRun.with_micro_batch_size, size=size, keeps_global=True)
            yield f"train.micro_batch_size={size}", cost, smaller
            break
    if config.precision.name in ("fp32", "tf32") and (run.device.type == "cpu" or run.device.capability >= (8, 0)):
        _, cost, apply = _change("precision.name", "bf16", "products of BF16; masters and sums stay FP32")
        yield "precision=bf16", cost, apply
    if model.recompute == "none":
        cost = "forward is computed twice, but for attention and every second matmul"
        yield _change("model.recompute", "selective", cost)
    if isinstance(config.optim, AdamW) and config.optim.name == "adamw":
        optim = _bf16_moments(config.optim)
        yield "optim=adamw-bf16", "moments rounded to BF16", lambda run: _with(run, optim=optim)
    if run.num_ranks > 1 and engine.zero_stage < 3:
        yield _change("engine.zero_stage", 3, "weights are gathered in forward and backward")
    if model.recompute != "full":
        yield _change("model.recompute", "full", "forward is computed twice")
    if run.device.type == "cuda":
        yield _change("engine.offload", "cpu", "the CPU updates; gradients and weights cross to the host and back")
    if engine.zero_stage:
        for factor in (2, 4, 8):
            ranks = factor * run.num_ranks
            yield f"ranks={ranks}", f"{factor} times the devices", partial(replace, num_ranks=ranks)


def _change(key: str, value: Any, cost: str) -> tuple[str, str, _Apply]:
    section, name = key.split(".")

    def apply(run: PlannedRun) -> PlannedRun:
        own = getattr(run.config, section)
        changed = replace(own, **{name: value}) if section != "engine" or name in settings_of(type(own)) else own
        if section == "engine" and changed.as_native() == own.as_native():  # which is what is planned
            raise ConfigError(f"{key}={value} changes nothing")
        return _with(run, **{section: changed})

    return f"{key}={str(value).lower()}", cost, apply


def _with(run: PlannedRun, **sections: Any) -> PlannedRun:
    return replace(run, config=replace(run.config, **sections))


def _bf16_moments(optim: AdamW) -> OptimKeys:
    record = OPTIM_KEYS["adamw-bf16"]
    shared = {item.name: getattr(optim, item.name) for item in fields(record) if item.name != "name"}
    return record(**shared)
