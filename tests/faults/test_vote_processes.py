"""Inf, NaN and huge numbers on one of several real ranks: all skip or all apply, and the culprit is right (F7).

On every rank, in every phase, in the first and last tensor of every flat buffer, also beside a rank without gradients.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import dtrain
from dtrain.engine.adapters.native import NativeEngine
from dtrain.engine.outcome import Culprit
from dtrain.sharding.layout import FlatLayout, ParameterSlot
from dtrain.sharding.placement import STAGES
from tests.helpers.fault_counts import FaultCounts
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Run, start
from tests.helpers.zoo import make

NUM_MICRO_BATCHES = 2
SCALE = 2.0**40  # each overflow halves it, and it must not reach its minimum
SMALL, LARGE = 1.0, 3e38  # twice LARGE overflows FP32


@dataclass(frozen=True)
class Fault:
    """A number injected into one micro-batch of some ranks, ascending."""

    ranks: tuple[int, ...]
    micro_batch: int
    value: float
    target: tuple[FlatLayout, ParameterSlot, int] | None = None  # element of a gradient; None: the loss is multiplied
    idle: int | None = None  # rank whose micro-batches have weight 0, without a graph if the stage allows it

    def expected(self, step: int) -> tuple[str | None, Culprit | None]:
        """Returns (reason, culprit)."""
        counts = {"num_inf": int(math.isinf(self.value)), "num_nan": int(math.isnan(self.value))}
        rank, micro_batch = self.ranks[0], self.micro_batch
        if self.target is None:
            counts["num_bad_losses"] = len(self.ranks)
            return "nonfinite_loss", Culprit(rank, step, "forward loss", micro_batch, **counts)
        layout, slot, element = self.target
        where = {"tensor": slot.spec.name, "start": element, "stop": element + 1}
        if not math.isfinite(self.value):
            return "overflow", Culprit(rank, step, "local gradient", micro_batch, **where, **counts)
        if len(self.ranks) > 1:
            owner = (slot.start + element) // layout.shard_numel
            return "overflow", Culprit(owner, step, "reduced gradient", **where, num_inf=1)
        return None, None  # a single large element is clipped


def faults_of(engine: NativeEngine) -> list[Fault]:
    """Returns faults of all kinds in all buffers, alternating between ranks and micro-batches."""
    world, found = engine.world_size, []
    for rank in range(world):
        found += [Fault((rank,), rank % NUM_MICRO_BATCHES, value) for value in (math.inf, math.nan)]
    found.append(Fault(tuple(range(world)), 1, math.nan))
    for layout in engine.sharded.layouts:
        for slot, element in ((layout.slots[0], 0), (layout.slots[-1], layout.slots[-1].spec.numel - 1)):
            target = (layout, slot, element)
            for value in (math.inf, math.nan):
                number = len(found)
                rank = number // 2 % world
                idle = (rank + 1) % world if number % 3 == 0 else None
                found.append(Fault((rank,), number % NUM_MICRO_BATCHES, value, target, idle))
        number = len(found)
        found.append(Fault((number % world,), 0, LARGE, target))  # its square would overflow FP32
        found.append(Fault((0, world - 1), 1, LARGE, target))  # only the sum does
        found.append(Fault((0, world - 1), 1, math.inf, target))
        found.append(Fault((number % world,), 1, SMALL, target))
    return found


def snapshot(engine: NativeEngine) -> list[Tensor]:
    trained = (tensor for kind in engine.states.saved_dtypes for tensor in engine.states.held(kind))
    return [tensor.clone() for tensor in (*trained, *engine.states.storages()["compute"])]


def attempt(engine: NativeEngine, fault: Fault | None) -> dtrain.StepOutcome:
    """Runs one step with the fault, if any."""
    entry = make("transformer")
    idle = fault is not None and engine.rank == fault.idle
    for number in engine.accumulate(range(NUM_MICRO_BATCHES)):
        if idle and engine.options.zero_stage < 3:
            engine.backward(torch.zeros(()), weight=0.0)
            continue
        loss = entry.loss(engine, entry.batch(number * engine.world_size + engine.rank))
        with ExitStack() as planted:
            if fault is not None and engine.rank in fault.ranks and number == fault.micro_batch:
                if fault.target is None:
                    loss = loss * fault.value
                else:
                    planted.callback(poison(engine, *fault.target[1:], fault.value).remove)
            engine.backward(loss, weight=0.0 if idle else 1.0)
    return engine.step()


def poison(engine: NativeEngine, slot: ParameterSlot, element: int, value: float) -> Any:
    """Sets one element of a parameter's gradient as autograd delivers it; returns the handle."""

    def hook(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[element] = value
        return grad

    return dict(engine.module.named_parameters())[slot.spec.name].register_hook(hook)


def run(rank: int, world: int, options: dict[str, Any]) -> list[tuple[str, str]]:
    """Runs every fault, each followed by a clean step; returns (fault, outcomes), which must agree on all ranks."""
    scale = dtrain.LossScale(mode="dynamic", init=SCALE, max=SCALE)
    engine = start(Run("transformer", options={"precision": "bf16", "loss_scale": scale, **options}))
    seen = []
    expected_scale, applied = SCALE, 0
    for number, fault in enumerate(faults_of(engine)):
        before = snapshot(engine)
        reason, culprit = fault.expected(2 * number)
        outcome = attempt(engine, fault)
        assert (outcome.reason, outcome.applied, outcome.loss_scale) == (reason, reason is None, expected_scale), fault
        assert outcome.culprit == culprit, fault
        if reason == "overflow":
            expected_scale /= 2
        assert engine.loss_scale.scale == expected_scale, f"{fault}: a bad gradient halves it, a bad loss leaves it"
        untouched = all(torch.equal(a, b) for a, b in zip(before, snapshot(engine), strict=True))
        # at stage 3 a rank may hold only padding, which never changes
        holds_some = engine.options.zero_stage < 3 or any(True for _ in engine.states.owned_shards("master"))
        assert untouched is not (outcome.applied and holds_some), f"{fault}: masters, moments and replicas"
        clean = attempt(engine, None)
        assert clean.applied, f"{fault}: the next clean step must apply"
        applied += 1 + outcome.applied
        assert (engine.attempted_steps, engine.applied_steps) == (2 * number + 2, applied)
        seen.append((str(fault), repr((outcome, clean))))
    return seen


DEFAULT = [(2, 3, False), (3, 0, True)]
REST = {*((world, stage, False) for world in (2, 3) for stage in STAGES), (3, 2, True)} - {*DEFAULT}


@pytest.mark.parametrize(
    ("world", "stage", "reproducible"),
    [*DEFAULT, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in sorted(REST))],
)
def test_all_skip_or_all_apply_and_the_culprit_is_right(
    faults: FaultCounts, world: int, stage: int, reproducible: bool
) -> None:
    ranks = run_ranks(world, run, {"zero_stage": stage, "reproducible": reproducible})
    assert len(ranks[0]) >= 32, "so that there are more than 160 in all"
    for rank in ranks[1:]:
        assert rank == ranks[0], "the ranks disagree"
    faults.passed("F7", len(ranks[0]))
