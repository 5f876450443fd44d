"""Changes of a configuration that make a run fit into the memory of its device."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, NamedTuple

from dtrain.config.engines import settings_of
from dtrain.config.model import DEFAULT_FACTORY, GPT2_FACTORY, HF_FACTORY
from dtrain.config.optim import OPTIM_KEYS
from dtrain.engine.adapters.native import NativeEngine
from dtrain.errors import ConfigError
from dtrain.planning.memory.plan import FITS, PER_SAMPLE, SAVED_COPY, MemoryPlan, plan_memory, saved_copy
from dtrain.planning.planned_run import PlannedRun, saved_bytes, split_memory
from dtrain.planning.record.recorder import UNSHARDED
from dtrain.sharding.states import TRANSFER

_NUM_CHANGES = 3


class Change(NamedTuple):
    """What to add to the command line, what it costs, and the memory with it.

    The states are exact, and the rest is in proportion; all is exact for another precision, and for recomputation.
    """

    keys: str
    cost: str
    plan: MemoryPlan

    @staticmethod
    def of(chosen: Collection[Candidate], plan: MemoryPlan) -> Change:
        keys = " ".join(f"{one.key}={str(one.value).lower()}" for one in chosen)
        return Change(keys, "; ".join(one.cost for one in chosen), plan)


class Candidate(NamedTuple):
    """A change of one key, and what it costs."""

    key: str
    value: Any
    cost: str

    def apply(self, run: PlannedRun) -> PlannedRun:
        """Returns ``run`` with the change; raises ``ConfigError`` if it cannot have it, or has it already."""
        config = run.config
        if self.key == "ranks":
            return replace(run, num_ranks=self.value)
        if self.key == "train.micro_batch_size":
            return run.with_micro_batch_size(self.value, keeps_global=True)
        if self.key == "optim":
            record = OPTIM_KEYS[self.value]
            shared = {item.name: getattr(config.optim, item.name) for item in fields(record) if item.name != "name"}
            return replace(run, config=replace(config, optim=record(**shared)))
        section, _, name = self.key.partition(".")
        own = getattr(config, section)
        is_known = section != "engine" or name in settings_of(type(own))
        changed = replace(own, **{name or "name": self.value}) if is_known else own
        if section == "engine" and changed.as_native() == own.as_native():  # which is what is planned
            raise ConfigError(f"{self.key}={self.value} changes nothing")
        return replace(run, config=replace(config, **{section: changed}))


def cheapest_changes(run: PlannedRun, plan: MemoryPlan) -> list[Change]:
    """Returns the three cheapest changes each of which makes ``run`` fit.

    If none does, the changes are added to each other until the run fits, and the last entry has all of them.
    """
    fitting: list[Change] = []
    useful: list[Candidate] = []
    for candidate in candidates(run, plan):
        with suppress(ConfigError):
            estimated = estimate(run, plan, candidate.apply(run))
            if estimated.high < plan.high:
                useful.append(candidate)
                fitting += [Change.of([candidate], estimated)] if estimated.fit == FITS else []
        if len(fitting) == _NUM_CHANGES:  # some of the others take a plan of their own, which takes seconds
            break
    chosen: dict[str, Candidate] = {}  # the last of each key
    together: list[Change] = []
    while useful and plan.fit != FITS and not fitting:
        candidate = useful.pop(0)
        with suppress(ConfigError):
            changed = candidate.apply(run)
            plan, run = estimate(run, plan, changed), changed
            chosen = {key: one for key, one in chosen.items() if key != candidate.key} | {candidate.key: candidate}
            together.append(Change.of(chosen.values(), plan))
    return fitting or together[-_NUM_CHANGES:]


def estimate(base: PlannedRun, plan: MemoryPlan, run: PlannedRun) -> MemoryPlan:
    """Returns the memory of ``run``: its own states, and the rest of ``plan``, which is that of ``base``."""
    if (run.config.precision, run.config.model) != (base.config.precision, base.config.model):  # other activations
        return plan_memory(run)
    factor = run.config.train.micro_batch_size / base.config.train.micro_batch_size
    peak = {kind: nbytes for kind, nbytes in plan.peak.items() if kind not in plan.states}
    peak |= {kind: int(nbytes * factor) for kind, nbytes in peak.items() if kind in PER_SAMPLE}
    with run.engine() as (engine, _):
        states, host = split_memory(engine)
        sharded = engine.sharded
        if sharded.reducer.exchange is not None:  # a ring is there from the start, other buffers are not
            states["unreduced_grad"] = max(states["unreduced_grad"], sharded.reducer.exchange.max_nbytes())
        if sharded.offload is not None:
            states[TRANSFER] = sharded.offload.max_device_nbytes(run.num_ranks)
        peak |= {**states, UNSHARDED: _unsharded_bytes(engine), SAVED_COPY: saved_copy(run, saved_bytes(engine)[0])}
    largest = int(plan.largest * factor)
    return replace(plan, num_ranks=run.num_ranks, states=states, host=host, peak=peak, largest=largest)


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


def candidates(run: PlannedRun, plan: MemoryPlan) -> list[Candidate]:
    """Returns the changes that ``run`` might have, the cheapest first."""
    config, engine, model = run.config, run.config.engine, run.config.model
    is_cpu, has_others = run.device.type == "cpu", run.num_ranks > 1
    stage, reshards = engine.zero_stage, engine.as_native().reshard_after_forward
    wants_bf16 = config.precision.name in ("fp32", "tf32") and (is_cpu or run.device.capability >= (8, 0))
    has_chunks = model.factory in (DEFAULT_FACTORY, GPT2_FACTORY, HF_FACTORY)
    micro, twice = config.train.micro_batch_size, "forward is computed twice"
    mostly = f"{twice}, but for attention and every second matmul"
    sizes = [size for size in range(micro // 2, 0, -1) if micro % size == 0]
    size = next((n for n in sizes if n == 1 or plan.can_hold(plan.tensors - (1 - n / micro) * plan.growing)), micro)
    rows: list[tuple[bool, str, Any, str]] = [
        (engine.reproducible, "engine.reproducible", False, "bits that depend on the number of ranks"),
        (not reshards, "engine.reshard_after_forward", True, "weights are gathered twice a micro-batch"),
        (has_others and stage < 1, "engine.zero_stage", 1, "nothing"),
        (has_others and stage < 2, "engine.zero_stage", 2, "gradients are sent in each micro-batch"),
        (is_cpu and config.checkpoint.asynchronous, "checkpoint.asynchronous", False, "a save stops training"),
        (has_chunks and model.loss_chunk == "none", "model.loss_chunk", "auto", "training returns no logits"),
        (size < micro, "train.micro_batch_size", size, f"{micro // size} times as many forwards, of smaller products"),
        (wants_bf16, "precision", "bf16", "products of BF16; masters and sums stay FP32"),
        (model.recompute == "none", "model.recompute", "selective", mostly),
        (config.optim.name == "adamw", "optim", "adamw-bf16", "moments rounded to BF16"),
        (has_others and stage < 3, "engine.zero_stage", 3, "weights are gathered in forward and backward"),
        (model.recompute != "full", "model.recompute", "full", twice),
        (not is_cpu, "engine.offload", "cpu", "the CPU updates; gradients and weights cross to the host and back"),
        *((stage > 0, "ranks", factor * run.num_ranks, f"{factor} times the devices") for factor in (2, 4, 8)),
    ]
    return [Candidate(key, value, cost) for is_possible, key, value, cost in rows if is_possible]
