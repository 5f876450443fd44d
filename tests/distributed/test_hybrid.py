"""Hybrid sharding: replicas of sharded states give the numbers of plain sharding, and send what the formula says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtrain
from dtrain.distributed.mesh import Mesh
from dtrain.distributed.setup import make_communicator
from dtrain.errors import ConfigError, ContractError, DivergenceError
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Result, Run, assert_follows_the_oracle, forward_backward, start, train_all
from tests.helpers.zoo import make

pytestmark = pytest.mark.processes

CPU = torch.device("cpu")


def run(precision: str = "fp32", *, steps: int = 8, accumulation: int = 3, **options: Any) -> Run:
    options = {"precision": precision, "shard_size": 2} | options
    return Run("transformer", steps=steps, accumulation=accumulation, unequal_weights=True, options=options)


@pytest.mark.parametrize("world", [4, 6])
def test_hybrid_follows_the_oracle(world: int) -> None:
    """Two and three replicas; the padding of three differs."""
    runs = [run(zero_stage=stage, steps=20) for stage in (1, 2, 3)]
    runs += [run("bf16", zero_stage=stage, steps=20, accumulation=1) for stage in (2, 3)]
    assert_follows_the_oracle(
        run_ranks(world, train_all, runs if world == 4 else runs[1:2]), runs if world == 4 else runs[1:2]
    )


def assert_equal_bits(result: Result, other: Result, case: str) -> None:
    assert [(o.loss, o.grad_norm) for o in result.outcomes] == [(o.loss, o.grad_norm) for o in other.outcomes], case
    for name, master in other.masters.items():
        assert torch.equal(result.masters[name], master), f"{case}: {name}"


def test_reproducible_bits_are_those_of_any_other_sharding() -> None:
    """Four ranks as 2 x 2 and as one replica, and one rank; dropout, clipping, weights; a tree with leftovers."""
    options = {"reproducible": True}
    cases = {
        4: [run("bf16", zero_stage=stage, **options) for stage in (1, 2, 3)]
        + [run("bf16", **options, shard_size=None)],
        1: [run("bf16", **options, shard_size=None, accumulation=12)],
    }
    of_ranks = {world: run_ranks(world, train_all, runs)[0] for world, runs in cases.items()}
    (expected,) = of_ranks[1]
    for case, result in zip(cases[4], of_ranks[4], strict=True):
        assert_equal_bits(result, expected, str(case.options))
    plain = run_ranks(4, train_all, [run("bf16")])[0][0]
    differs = [not torch.equal(plain.masters[name], master) for name, master in expected.masters.items()]
    assert any(differs), "the control: sums in another order differ"


def first_step(rank: int, world: int, of: Run, shared: bool) -> dict[str, Any]:
    """Takes a step; returns its collectives with their bytes, and the layouts of the flat buffers."""
    comm = make_communicator(dist.group.WORLD, CPU, shared_memory=shared)
    engine = start(of, comm=comm)
    entries: Counter[tuple[str, str]] = Counter()
    record = comm.schedule.record

    def counted(op: str, label: str, tensor: torch.Tensor) -> Any:
        entries[op, label] += tensor.nbytes
        return record(op, label, tensor)

    comm.schedule.record = counted  # type: ignore[method-assign]
    forward_backward(engine, of, 0)
    engine.step()
    layouts = [
        (layout.name, layout.numel, layout.shard_numel, layout.dtype.itemsize) for layout in engine.sharded.layouts
    ]
    return {
        "entries": entries,
        "layouts": layouts,
        "axes": [type(axis).__name__ for axis in vars(engine.mesh).values()],
    }


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_traffic_by_label_and_axis_is_the_formula(stage: int, shared: bool) -> None:
    """Recorded sizes: a reduction's is what each rank gives, a gather's what each rank gets."""
    micro_batches = 3
    of = run("bf16", zero_stage=stage, accumulation=micro_batches)
    for result in run_ranks(4, first_step, of, shared):
        entries = dict(result["entries"])
        for label, numel, shard_numel, itemsize in result["layouts"]:
            # within the replica: in the dtype of the weights, or the FP32 sum of a rank's micro-batches
            within = entries.pop(("all_to_all_single", label))
            gap = within - (4 * numel if stage == 1 else micro_batches * numel * itemsize)
            weights = 0 if shared or stage == 1 else micro_batches * 2 * 64 * itemsize  # in gaps of the first send
            assert gap in {0, weights}
            # across: an FP32 shard, once a step whatever the micro-batches; its parts are gathered
            assert entries.pop(("all_to_all_single", f"{label} across replicas")) == 4 * shard_numel
            assert entries.pop(("all_gather", f"{label} across replicas")) == 4 * shard_numel
            # within: after the update, or at stage 3 in each micro-batch; prefetch keeps both blocks until backward
            gathers = micro_batches if stage == 3 else 1
            assert entries.pop(("all_gather", label)) == gathers * numel * itemsize
        votes = {label: nbytes for (op, label), nbytes in entries.items() if op == "gather_rows"}
        assert votes == {"vote": 22 * 8}, "one row of a rank"
        assert all(op == "gather_rows" for op, _ in entries), entries
        expected = "HostMemory" if shared else "GlooGroup"
        assert result["axes"] == [expected] * 3


def plant(rank: int, world: int, bad_rank: int) -> list[dtrain.StepOutcome]:
    of = run("fp32", accumulation=1)
    engine = start(of)
    outcomes = []
    for step in range(3):
        forward_backward(engine, of, step, loss_factor=float("inf") if (rank, step) == (bad_rank, 1) else 1.0)
        outcomes.append(engine.step())
    return outcomes


@pytest.mark.parametrize("bad_rank", [1, 2, 3])
def test_a_rank_of_any_replica_makes_all_skip_and_is_named(bad_rank: int) -> None:
    of_ranks = run_ranks(4, plant, bad_rank)
    assert all([o.applied for o in outcomes] == [True, False, True] for outcomes in of_ranks)
    assert all(repr(outcomes) == repr(of_ranks[0]) for outcomes in of_ranks), "the same outcome on every rank"
    culprit = of_ranks[0][1].culprit
    assert culprit is not None
    assert culprit.rank == bad_rank


def overflow(rank: int, world: int, shard_size: int | None) -> dtrain.StepOutcome:
    """A gradient of rank 3 has one infinite element."""
    of = run("fp32", accumulation=1, shard_size=shard_size)
    engine = start(of)
    if rank == 3:
        first = next(p for p in engine.module.parameters() if p.dim() == 2)
        mask = torch.zeros(first.shape)
        mask[0, 0] = torch.inf
        first.register_hook(lambda grad: grad + mask)
    forward_backward(engine, of, 0)
    return engine.step()


def test_a_bad_gradient_is_counted_in_one_replica() -> None:
    of_sizes = {size: run_ranks(4, overflow, size) for size in (None, 2)}
    for outcomes in of_sizes.values():
        assert all(repr(outcome) == repr(outcomes[0]) for outcome in outcomes)
    plain, hybrid = (outcomes[0].culprit for outcomes in of_sizes.values())
    assert plain is not None
    assert (plain.rank, plain.num_inf, plain.num_nan) == (3, 1, 0)
    assert hybrid == plain


def unmarked_last(rank: int, world: int, shard_size: int | None) -> float:
    """Rank 0 marks no micro-batch as the last one, the others mark theirs."""
    of = run("bf16", zero_stage=2, shard_size=shard_size)
    engine = start(of)
    entry = make("transformer")
    for index in range(3):
        with engine.micro_batch(last=rank > 0 and index == 2):
            engine.backward(entry.loss(engine, entry.batch(index * world + rank)))
    return float(engine.step().loss)


def test_ranks_may_mark_the_last_micro_batch_or_not() -> None:
    assert run_ranks(4, unmarked_last, 2) == run_ranks(4, unmarked_last, None)


def fewer_micro_batches(rank: int, world: int, options: dict[str, Any]) -> str:
    """The second replica takes one micro-batch less."""
    of = replace(run("bf16", **options), accumulation=2 if rank < 2 else 1)
    engine = start(of)
    try:
        forward_backward(engine, of, 0)
        engine.step()
        return str(engine.master_state())
    except DivergenceError:
        return "diverged"


@pytest.mark.parametrize("options", [{"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 2, "reproducible": True}])
def test_replicas_with_other_numbers_of_micro_batches_end(options: dict[str, Any]) -> None:
    assert run_ranks(4, fewer_micro_batches, options) == ["diverged"] * 4


def degrade(rank: int, world: int, kind: str) -> str:
    make = Mesh.of

    def degraded(comm: Any, shard_size: int | None) -> Mesh:
        mesh = make(comm, shard_size)
        if kind == "flat":
            return make(comm, None)
        return Mesh(mesh.world, mesh.replicate, mesh.shard)

    Mesh.of = staticmethod(degraded)  # type: ignore[method-assign]
    try:
        start(run())
    except ContractError as error:
        return str(error)
    finally:
        Mesh.of = make  # type: ignore[method-assign]
    return ""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("flat", "rank 0: dp_shard has ranks [0, 1, 2, 3], but 2 replicas of 2 ranks have [0, 1]"),
        ("swapped", "rank 0: dp_shard has ranks [0, 2], but 2 replicas of 2 ranks have [0, 1]"),
    ],
)
def test_another_mesh_than_the_configured_one_is_refused(kind: str, message: str) -> None:
    assert run_ranks(4, degrade, kind)[0] == message


def refused(rank: int, world: int) -> str:
    try:
        start(run(shard_size=3))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_size_that_does_not_divide_the_ranks_is_refused_by_all() -> None:
    expected = "Native.shard_size=3 does not divide the number of ranks, 4; set it to 2 or 4, or remove it"
    assert run_ranks(4, refused) == [expected] * 4
