"""One-bit flips in replicas, masters and moments: found at the next check, named on every rank, never saved (F8)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import dtrain
from dtrain.checkpoint.directory import committed_checkpoints
from dtrain.engine.step import StepEngine
from dtrain.errors import CorruptionError
from dtrain.parameters.model_states import MASTER
from tests.engines.helpers import batch, start, train_step
from tests.helpers.bit_flips import flip_bit
from tests.helpers.fault_counts import FaultCounts
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

REPLICA = "compute replica"
Case = tuple[str, int, str]
NATIVE = [("native", stage, precision) for stage in range(4) for precision in ("fp32", "bf16")]
FSDP2 = [("fsdp2", 2, "bf16"), ("fsdp2", 3, "fp32"), ("fsdp2", 3, "bf16")]
OTHERS = [("ddp", 0, "fp32"), ("ddp", 0, "bf16"), *FSDP2, ("deepspeed", 1, "bf16"), ("deepspeed", 3, "bf16")]
FEW: list[Case] = [("native", 1, "fp32"), ("native", 2, "bf16"), ("native", 3, "fp32"), OTHERS[0], FSDP2[-1]]
ON_THREE: list[Case] = [("native", 0, "bf16"), ("native", 1, "fp32"), ("native", 2, "bf16"), ("ddp", 0, "fp32")]
KINDS = (REPLICA, MASTER, "exp_avg", REPLICA, "exp_avg_sq", MASTER, "frozen", "buffer")
PLACES = ("step", "save", "asynchronous save", "step after a save")
CONTROL_STEPS = 3


class Flip(NamedTuple):
    """A flip, the same on all ranks."""

    kind: str
    place: str  # where it must be found: at the next step's update, or at the save before it
    rank: int  # that has it
    seed: int  # of the tensor, the element and the bit


class Seen(NamedTuple):
    """What one rank knows of a flip."""

    flip: Flip
    planted: tuple[Any, ...] | None  # (ranks, tensor, kind) on the rank that planted it
    found: tuple[tuple[Any, ...], ...] | None  # the same of each corruption that the error named, if there was one
    was_saved: bool


def plan(case: Case, world: int, count: int) -> list[Flip]:
    choice = random.Random(repr((case, world)))
    first = choice.randrange(len(KINDS))
    flips = []
    for number in range(count):
        kind, place = KINDS[(first + number) % len(KINDS)], PLACES[(number + case[1]) % len(PLACES)]
        flips.append(Flip(kind, place, choice.randrange(world), choice.randrange(1 << 30)))
    return flips


def tensors(engine: StepEngine, kind: str) -> list[tuple[str, str, Tensor]]:
    """Name, kind in the error, and memory of all tensors of ``kind`` on this rank."""
    if kind == "buffer":
        return [("table", kind, engine.module.get_buffer("table"))]
    if kind == "frozen":
        shards = [(shard.name, kind, shard.data) for shard in engine.states.frozen_shards()]
        return shards or [(name, kind, p) for name, p in engine.states.replicated_frozen().items() if p.numel()]
    if kind != REPLICA:
        return [(shard.name, kind, shard.data) for shard in engine.states.local_shards(kind) if shard.data.numel()]
    if engine.name == "fsdp2" or engine.options.zero_stage == 3:
        return [(shard.name, kind, shard.data) for shard in engine.states.compute_shards()]
    found = []
    owned = {shard.name: shard for shard in engine.states.local_shards(MASTER)}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            flat, own = parameter.detach().view(-1), owned.get(name)
            low, high = (0, 0) if own is None or flat.dtype != torch.float32 else (own.start, own.stop)
            # an FP32 replica is the master where this rank has that
            ranges = [(REPLICA, 0, low), (MASTER, low, high), (REPLICA, high, flat.numel())]
            found += [(name, label, flat[start:stop]) for label, start, stop in ranges if start < stop]
    return found


def plant(engine: StepEngine, flip: Flip) -> tuple[Any, ...] | None:
    """Flips the bit on its rank; returns what must be named."""
    engine.comm.barrier()  # the other ranks may still gather from this one
    if engine.rank != flip.rank:
        return None
    choice = random.Random(flip.seed)
    # the last rank may hold no master
    candidates = tensors(engine, flip.kind) or tensors(engine, MASTER) or tensors(engine, "buffer")
    name, kind, data = choice.choice(candidates)
    flip_bit(data, choice.randrange(data.numel()), choice.randrange(8 * data.element_size()))
    return (engine.rank,), name, kind


def found_by(action: Callable[[], object]) -> tuple[tuple[Any, ...], ...] | None:
    try:
        action()
    except CorruptionError as error:
        named = [item for item in error.corruptions if f"{item.kind} of '{item.tensor}' on rank" in str(error)]
        return tuple((item.ranks, item.tensor, item.kind) for item in named)
    return None


def step_with(engine: StepEngine, flip: Flip) -> tuple[Any, ...]:
    """A step before whose update the flip happens: forward and backward have used the weights."""
    for index in engine.accumulate(range(2)):
        engine.backward(engine(tokens=batch(index)))
    planted = plant(engine, flip)
    return planted, found_by(engine.step)


def save(engine: StepEngine, folder: Path, *, place: str = "save") -> None:
    engine.save(folder, asynchronous=place != "save")
    if place == "step after a save":  # which runs meanwhile, and fails too
        train_step(engine, engine.world_size)
    engine.wait_for_save()


def try_flip(engine: StepEngine, flip: Flip, folder: Path, good: Path, micro_batches: int) -> Seen:
    before = committed_checkpoints(folder)
    train_step(engine, micro_batches)
    # what fully_shard keeps of the compute weights is written by the next forward
    if engine.name == "fsdp2" and flip.kind == REPLICA:
        planted, found = step_with(engine, flip)
    else:
        planted = plant(engine, flip)
        if flip.place == "step":
            found = found_by(lambda: train_step(engine, micro_batches))
        else:
            found = found_by(lambda: save(engine, folder, place=flip.place))
    if found is not None:  # the state cannot be saved, whatever the caller tries
        assert found_by(lambda: engine.save(folder)) == found
    engine.load(good)
    engine.comm.barrier()
    return Seen(flip, planted, found, was_saved=committed_checkpoints(folder) != before)


def run(rank: int, world: int, folder: Path, cases: Sequence[Case], count: int) -> list[Any]:
    """Per case: number of audits without a flip, of errors that they raised, and what was seen of each flip."""
    results = []
    for case in cases:
        engine = start(*case[:2], precision=case[2], audit=dtrain.Audit(every=1))
        engine.module.register_buffer("table", torch.arange(5.0))
        path = folder / "-".join(map(str, (world, *case)))
        alarms = [found_by(lambda: train_step(engine, world)) for _ in range(CONTROL_STEPS)]  # noqa: B023
        alarms.append(found_by(lambda: save(engine, path)))  # noqa: B023
        good = committed_checkpoints(path)[-1]
        seen = [try_flip(engine, flip, path, good, world) for flip in plan(case, world, count)]
        alarms += [found_by(lambda: train_step(engine, world)) for _ in range(CONTROL_STEPS)]  # noqa: B023
        alarms.append(found_by(lambda: save(engine, path, place="asynchronous save")))  # noqa: B023
        results.append((len(alarms), sum(alarm is not None for alarm in alarms), seen))
    return results


@pytest.mark.parametrize(
    ("world", "cases"),
    [(2, FEW), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ((2, NATIVE + OTHERS), (3, ON_THREE)))],
)
def test_every_flip_is_found_and_named_on_every_rank(
    tmp_path: Path, world: int, cases: list[Case], faults: FaultCounts
) -> None:
    count = 4 if cases is FEW else faults.count(ci=10, full=14)
    ranks = run_ranks(world, run, tmp_path, cases, count)
    num_audits, kinds = 0, set()
    for case, *of_ranks in zip(cases, *ranks, strict=True):
        num_audits += of_ranks[0][0]
        assert not any(false_alarms for _, false_alarms, _ in of_ranks)
        for seen in zip(*(flips for _, _, flips in of_ranks), strict=True):
            kinds.add(seen[0].flip.kind)
            planted = seen[seen[0].flip.rank].planted
            context = f"{case} {seen[0].flip} planted {planted}: {[own.found for own in seen]}"
            assert all(own.found == (planted,) for own in seen), context
            assert not any(own.was_saved for own in seen), context
    assert kinds == set(KINDS)
    faults.passed("F8", count * len(cases), found=count * len(cases), audits=num_audits, false_alarms=0)
