"""Checkpoints and audits of hybrid sharding: replica 0 saves, every replica is compared, loaded and proven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dtrain
from dtrain.checkpoint import list_checkpoints, verify
from dtrain.engine.parts.checkpoint import checkpointer
from dtrain.engine.step import StepEngine
from dtrain.errors import CheckpointError
from dtrain.parameters.compute_shard import COMPUTE
from dtrain.parameters.model_states import MASTER
from tests.engines.checks.audits import flip_master
from tests.engines.helpers import fingerprints, start, state_digests, train_step
from tests.faults.test_bit_flips import Seen, found_by, plan, try_flip
from tests.helpers.bit_flips import flip_bit
from tests.helpers.fault_counts import FaultCounts
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

WORLD, SHARD_SIZE = 4, 2
Layout = tuple[str, int, int | None]  # engine, stage, ranks of a replica
HYBRID: Layout = ("native", 2, SHARD_SIZE)


def started(layout: Layout, **options: Any) -> StepEngine:
    name, stage, shard_size = layout
    if shard_size is not None:
        options["shard_size"] = shard_size
    return start(name, stage, **options)


def files(path: Path) -> list[str]:
    return sorted(file.name for checkpoint in path.glob("step-*") for file in checkpoint.glob("*.safetensors"))


def save_from(rank: int, world: int, layout: Layout, source: Path | None, target: Path) -> dict[str, str]:
    """Trains or loads, then saves; returns digests of the whole states, which all ranks gather."""
    engine = started(layout, seed=5 if source is None else 7, ema_decay=0.9)
    if source is None:
        for _ in range(2):
            assert train_step(engine, 4).applied
    else:
        engine.load(source)
    engine.save(target)
    assert (engine.master_state().keys() == engine.states.shapes.keys()) == (rank == 0)
    return state_digests(engine)


def test_any_mesh_loads_any_other(tmp_path: Path) -> None:
    chain: list[tuple[Layout, int]] = [
        (("native", 3, None), 4),
        (("native", 2, SHARD_SIZE), 4),
        (("fsdp2", 3, None), 2),
        (("native", 3, SHARD_SIZE), 4),
    ]
    expected, digests = None, None
    for number, (layout, world) in enumerate(chain):
        source, target = tmp_path / f"{number - 1}" if number else None, tmp_path / f"{number}"
        found = run_ranks(world, save_from, layout, source, target)
        expected, digests = expected or fingerprints(target), digests or found[0]
        assert fingerprints(target) == expected, layout
        assert found == [digests] * world, layout
        num_files = SHARD_SIZE if layout[2] else world
        assert files(target) == [f"r{rank:04d}.safetensors" for rank in range(num_files)]
        assert verify(target).ok
        assert [(item.num_files, item.world_size) for item in list_checkpoints(target)] == [(num_files, world)]


def train_on(rank: int, world: int, layout: Layout, source: Path | None, target: Path | None) -> dict[str, str]:
    """Takes two steps of four micro-batches; two more after a save."""
    engine = started(layout, precision="fp32", dropout=0.1, reproducible=True, seed=7 if source else 5)
    if source is not None:
        engine.load(source)
    for _ in range(2):
        train_step(engine, 4)
    if target is not None:
        engine.save(target, asynchronous=True)
        for _ in range(2):
            train_step(engine, 4)
    return state_digests(engine, buffers=False)  # they depend on the micro-batches of their rank


@pytest.mark.parametrize("first", [HYBRID, ("native", 3, SHARD_SIZE)])
def test_reproducible_run_resumes_with_the_same_bits_on_any_mesh(tmp_path: Path, first: Layout) -> None:
    (expected, *_) = run_ranks(WORLD, train_on, first, None, tmp_path)
    for layout, world in ((first, WORLD), (("native", 3, None), 2)):
        assert run_ranks(world, train_on, layout, tmp_path, None) == [expected] * world, layout


def measured(rank: int, world: int) -> list[tuple[int, int]]:
    engine = started(HYBRID)
    train_step(engine, world)
    with engine.measure_precision() as measurement:
        train_step(engine, world)
    report: Any = measurement.report()
    return [(p.update.num_changed, p.numel) for p in report.parameters if p.update is not None]


def test_measured_updates_count_each_master_once() -> None:
    for counts in run_ranks(WORLD, measured):
        assert all(changed <= numel for changed, numel in counts), counts
        assert sum(changed == numel for changed, numel in counts) > 3, counts


def save_with_a_difference(rank: int, world: int, every: int, is_announced: bool, folder: Path) -> Any:
    engine = started(("native", 3, SHARD_SIZE), precision="fp32", audit=dtrain.Audit(every=every))
    if is_announced:
        engine.expect_save()
    train_step(engine, world)
    engine.save(folder / "good")
    train_step(engine, world)
    if is_announced:
        engine.expect_save()
    train_step(engine, world)
    flip_master(engine, 3)
    found = found_by(lambda: engine.save(folder / "bad"))
    assert found_by(lambda: train_step(engine, world)) == found
    engine.load(folder / "good")
    engine.save(folder / "again")
    return found


@pytest.mark.parametrize(
    ("every", "is_announced", "ranks"),
    [(0, False, (1, 3)), (1000, False, (1, 3)), (1000, True, (3,))],
    ids=["no audit", "no record", "record"],
)
def test_difference_between_replicas_refuses_the_save(
    tmp_path: Path, every: int, is_announced: bool, ranks: tuple[int, ...]
) -> None:
    found = run_ranks(WORLD, save_with_a_difference, every, is_announced, tmp_path)
    assert found == [found[0]] * WORLD
    assert [(item[0], item[2]) for item in found[0]] == [(ranks, MASTER)]
    assert not files(tmp_path / "bad")
    assert fingerprints(tmp_path / "again") == fingerprints(tmp_path / "good")


def flips(rank: int, world: int, count: int, folder: Path) -> list[Seen]:
    seen = []
    for stage, precision in ((1, "bf16"), (3, "fp32")):
        engine = started(("native", stage, SHARD_SIZE), precision=precision, audit=dtrain.Audit(every=1))
        engine.module.register_buffer("table", torch.arange(5.0))
        path = folder / f"{stage}"
        train_step(engine, world)
        good = engine.save(path)
        seen += [try_flip(engine, flip, path, good, world) for flip in plan(("native", stage, "hybrid"), world, count)]
    return seen


def test_flips_in_any_replica_are_found_and_the_rank_named(tmp_path: Path, faults: FaultCounts) -> None:
    ranks = run_ranks(WORLD, flips, faults.count(ci=4, full=30), tmp_path)
    assert {seen.flip.rank // SHARD_SIZE for seen in ranks[0]} == {0, 1}
    for of_flip in zip(*ranks, strict=True):
        planted = next(seen.planted for seen in of_flip if seen.planted is not None)
        assert [seen.found for seen in of_flip] == [(planted,)] * WORLD, of_flip[0].flip
        assert not of_flip[0].was_saved
    faults.passed("F8", len(ranks[0]))


def diverge(rank: int, world: int) -> Any:
    """An update of one rank writes other bits than those of the rank at its place, so its record is of no help."""
    engine = started(("native", 3, SHARD_SIZE), precision="fp32", audit=dtrain.Audit(every=1))
    train_step(engine, world)
    engine._between.parts.audit.forget()
    flip_master(engine, 2)
    engine.states.refresh()
    engine._between.parts.audit.record()
    return found_by(lambda: train_step(engine, world))


@pytest.mark.parametrize(("world", "ranks"), [(4, (0, 2)), (6, (2,))])
def test_replicas_that_an_update_left_unequal_are_judged_by_the_majority(world: int, ranks: tuple[int, ...]) -> None:
    found = run_ranks(world, diverge)
    assert found == [found[0]] * world
    assert [(item[0], item[2]) for item in found[0]] == [(ranks, MASTER)]


def flip_gathered(rank: int, world: int) -> list[Any]:
    """A flip in what rank 2 has gathered from rank 3, of its own replica."""
    engine = started(("native", 1, SHARD_SIZE), precision="bf16", audit=dtrain.Audit(every=1))
    train_step(engine, world)
    engine.comm.barrier()  # as in flip_master
    if rank == 2:
        flip_bit(next(shard for shard in engine.states.compute_shards() if shard.owner == 1).data, 0, 5)
    return [(item[0], item[2]) for item in found_by(lambda: train_step(engine, world))]


def test_gathered_weights_are_judged_by_the_owner_in_their_replica() -> None:
    assert run_ranks(WORLD, flip_gathered) == [[((2,), COMPUTE)]] * WORLD


def load_wrongly(rank: int, world: int, folder: Path) -> str:
    engine = started(HYBRID)
    train_step(engine, world)
    engine.save(folder)
    real = checkpointer.Checkpointer._read

    def read(self: Any, reader: Any) -> None:
        real(self, reader)
        if rank == 2:
            next(shard for shard in engine.states.local_shards(MASTER)).data[0] += 1e-3

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointer.Checkpointer, "_read", read)
        with pytest.raises(CheckpointError) as error:
            engine.load(folder)
    engine.load(folder)
    return str(error.value)


def test_every_replica_proves_what_it_loaded(tmp_path: Path) -> None:
    messages = run_ranks(WORLD, load_wrongly, tmp_path)
    assert messages == [messages[0]] * WORLD
    assert "failed on rank 2 (and on 1 more): " in messages[0]
    assert "differs from what was saved" in messages[0]
