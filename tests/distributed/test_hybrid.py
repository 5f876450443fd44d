"""Hybrid sharding: replicas of sharded states give the numbers of plain sharding, and send what the formula says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import dtrain
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.mesh import Mesh
from dtrain.distributed.transport.choose import make_communicator
from dtrain.errors import ConfigError, ContractError
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Result, Run, assert_follows_the_oracle, forward_backward, start, train_all
from tests.helpers.zoo import make

pytestmark = pytest.mark.processes

CPU = torch.device("cpu")


def run(precision: str = "fp32", *, steps: int = 4, accumulation: int = 3, **options: Any) -> Run:
    options = {"precision": precision, "shard_size": 2} | options
    return Run("transformer", steps=steps, accumulation=accumulation, unequal_weights=True, options=options)


@pytest.mark.parametrize(
    ("world", "runs"),
    [
        (4, [run(zero_stage=stage) for stage in (1, 2, 3)]),
        (6, [run(zero_stage=2, accumulation=1)]),
        pytest.param(4, [run("bf16", zero_stage=stage, steps=20) for stage in (2, 3)], marks=pytest.mark.exhaustive),
    ],
    ids=["two replicas", "three", "bf16"],
)
def test_hybrid_follows_the_oracle(world: int, runs: list[Run]) -> None:
    """The padding of three replicas differs."""
    assert_follows_the_oracle(run_ranks(world, train_all, runs), runs)


def assert_equal_bits(result: Result, other: Result, case: str) -> None:
    assert [(o.loss, o.grad_norm) for o in result.outcomes] == [(o.loss, o.grad_norm) for o in other.outcomes], case
    for name, master in other.masters.items():
        assert torch.equal(result.masters[name], master), f"{case}: {name}"


def test_reproducible_bits_are_those_of_any_other_sharding() -> None:
    """Four ranks as 2 x 2 and as one replica, and one rank; dropout, clipping, weights; a tree with leftovers."""
    cases = [run(steps=2, zero_stage=stage, reproducible=True) for stage in (1, 2, 3)]
    cases += [run(steps=2, reproducible=True, shard_size=None), run(steps=2)]
    *results, plain = run_ranks(4, train_all, cases)[0]
    ((expected,),) = run_ranks(1, train_all, [run(steps=2, reproducible=True, shard_size=None, accumulation=12)])
    for case, result in zip(cases, results, strict=False):
        assert_equal_bits(result, expected, str(case.options))
    differs = [not torch.equal(plain.masters[name], master) for name, master in expected.masters.items()]
    assert any(differs), "the control: sums in another order differ"


MICRO_BATCHES = 3


def first_step(rank: int, world: int, shared: bool) -> list[tuple[dict[tuple[str, str], int], list[Any], list[str]]]:
    """Takes a step at each stage; returns its collectives with their bytes, the layouts and the kinds of the axes."""
    found = []
    for stage in (1, 2, 3):
        of = run("bf16", zero_stage=stage, accumulation=MICRO_BATCHES)
        engine = start(of, comm=make_communicator(dist.group.WORLD, CPU, shared_memory=shared))
        with mock.patch.object(engine.comm.schedule, "record", wraps=engine.comm.schedule.record) as record:
            forward_backward(engine, of, 0)
            engine.step()
        entries: Counter[tuple[str, str]] = Counter()
        for op, label, tensor in (call.args for call in record.call_args_list):
            entries[op, label] += tensor.nbytes
        layouts = [(one.name, one.numel, one.shard_numel, one.dtype.itemsize) for one in engine.sharded.layouts]
        found.append((dict(entries), layouts, [type(axis).__name__ for axis in vars(engine.states.mesh).values()]))
    return found


@pytest.mark.parametrize("shared", [True, False])
def test_traffic_by_label_and_axis_is_the_formula(shared: bool) -> None:
    """Recorded sizes: a reduction's is what each rank gives, a gather's what each rank gets."""
    for of_rank in run_ranks(4, first_step, shared):
        for stage, (entries, layouts, axes) in zip((1, 2, 3), of_rank, strict=True):
            for label, numel, shard_numel, itemsize in layouts:
                # within the replica: in the dtype of the weights, or the FP32 sum of a rank's micro-batches
                within = entries.pop(("all_to_all_single", label))
                gap = within - (4 * numel if stage == 1 else MICRO_BATCHES * numel * itemsize)
                weights = 0 if shared or stage == 1 else MICRO_BATCHES * 2 * 64 * itemsize  # in gaps of the first send
                assert gap in {0, weights}
                # across: an FP32 shard, once a step whatever the micro-batches; its parts are gathered
                assert entries.pop(("all_to_all_single", f"{label} across replicas")) == 4 * shard_numel
                assert entries.pop(("all_gather", f"{label} across replicas")) == 4 * shard_numel
                # within: after the update, or at stage 3 in each micro-batch; prefetch keeps both blocks until backward
                gathers = MICRO_BATCHES if stage == 3 else 1
                assert entries.pop(("all_gather", label)) == gathers * numel * itemsize
            votes = {label: nbytes for (op, label), nbytes in entries.items() if op == "gather_rows"}
            assert votes == {"vote": (22 + 1) * 8}, "one row of a rank: its fields, and a bit for each parameter"
            assert all(op == "gather_rows" for op, _ in entries), entries
            assert axes == ["HostMemory" if shared else "GlooGroup"] * 3


def overflow(rank: int, world: int, shard_size: int | None) -> list[dtrain.StepOutcome]:
    """In the second step a gradient of rank 3 has one infinite element."""
    of = run("fp32", accumulation=1, shard_size=shard_size)
    engine = start(of)
    mask = torch.tensor(0.0)
    first = next(p for p in engine.module.parameters() if p.dim() == 2)
    first.register_hook(lambda grad: grad + mask)
    outcomes = []
    for step in range(3):
        mask = torch.zeros(first.shape)
        mask[0, 0] = torch.inf if (rank, step) == (3, 1) else 0.0
        forward_backward(engine, of, step)
        outcomes.append(engine.step())
    return outcomes


def test_a_bad_gradient_of_any_replica_is_counted_once_and_skipped_by_all() -> None:
    plain, hybrid = (run_ranks(4, overflow, size) for size in (None, 2))
    for of_ranks in (plain, hybrid):
        assert all([o.applied for o in outcomes] == [True, False, True] for outcomes in of_ranks)
        assert all(repr(outcomes) == repr(of_ranks[0]) for outcomes in of_ranks), "the same outcome on every rank"
    culprit: Any = plain[0][1].culprit
    assert (culprit.rank, culprit.num_inf, culprit.num_nan) == (3, 1, 0)
    assert hybrid[0][1].culprit == culprit


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


def refusals(rank: int, world: int) -> list[str]:
    """Returns the errors of a mesh without replicas, of one with swapped axes, and of a size that does not divide."""
    make = Mesh.of
    meshes: list[Callable[[Any, int | None], Mesh]] = [
        lambda comm, size: make(comm, None),
        lambda comm, size: Mesh(comm, make(comm, size).replicate, make(comm, size).shard),
        make,
    ]
    said = []
    for of, options in zip(meshes, ({}, {}, {"shard_size": 3}), strict=True):
        with mock.patch.object(Mesh, "of", of), pytest.raises((ContractError, ConfigError)) as error:
            start(run(**options))
        said.append(str(error.value))
    return said


def test_another_mesh_than_the_configured_one_is_refused_by_all() -> None:
    expected = [
        "rank 0: dp_shard has ranks [0, 1, 2, 3], but 2 replicas of 2 ranks have [0, 1]",
        "rank 0: dp_shard has ranks [0, 2], but 2 replicas of 2 ranks have [0, 1]",
        "Native.shard_size=3 does not divide the number of ranks, 4; set it to 2 or 4, or remove it",
    ]
    results = run_ranks(4, refusals)
    assert results[0] == expected
    assert all(said[2] == expected[2] for said in results)


SETTINGS = {
    "matrices": ("transformer", {"optimizer": dtrain.Muon(lr=1e-2)}),
    "remainders": ("transformer", {"master": "remainder"}),
    "average": ("transformer", {"ema_decay": 0.9}),
    "wide reduction": ("transformer", {"reduce_dtype": "fp32"}),
    "frozen shards": ("partly_frozen", {"zero_stage": 3}),
    "branches": ("sometimes_used", {}),
    "fp8": ("transformer", {"precision": "fp8"}),
    "fp8 shards": ("transformer", {"precision": "fp8", "zero_stage": 3}),
    "scaled loss": ("mlp", {"precision": "fp16"}),
}


SLOW = {"average", "wide reduction", "fp8", "scaled loss"}


@pytest.mark.parametrize(
    "setting", [pytest.param(name, marks=pytest.mark.exhaustive if name in SLOW else ()) for name in SETTINGS]
)
def test_settings_keep_the_bits_of_one_replica(setting: str) -> None:
    model, options = SETTINGS[setting]
    options = {"precision": "bf16", "zero_stage": 2, "reproducible": True, **options}
    plain = Run(model, accumulation=2, steps=2, options=options)
    expected, got = run_ranks(4, train_all, [plain, plain.with_options(shard_size=2)])[0]
    assert all(outcome.applied for outcome in got.outcomes)
    assert_equal_bits(got, expected, setting)


def train_early(rank: int, world: int, runs: list[Run]) -> tuple[list[Result], list[str]]:
    """Sums over the replicas during backward, as on GPUs; returns the labels of the last reductions of a step, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "device_is_host", property(lambda _: False))
        results = train_all(rank, world, runs)
        engine = start(runs[0])
        forward_backward(engine, runs[0], 0)
        engine.finish_gradients()
        return results, [entry for entry in engine.comm.schedule.log if entry.startswith("all_to_all_single(")]


def test_sums_during_backward_have_the_same_bits() -> None:
    """The ranks wait for the same reductions, whatever their graphs, before they start the sums of the replicas."""
    runs = [
        run(precision, steps=2, accumulation=2, zero_stage=stage, reproducible=exact, sharding_units=["blocks.*"])
        for precision, stage, exact in (("bf16", 1, False), ("fp32", 2, True), ("fp32", 3, False))
    ]
    runs.append(Run("sometimes_used", steps=3, accumulation=2, options={"precision": "fp32", "shard_size": 2}))
    at_the_end = run_ranks(4, train_all, runs)[0]
    early, log = run_ranks(4, train_early, runs)[0]
    first_sum = next(number for number, entry in enumerate(log) if "across replicas" in entry)
    assert any("across replicas" not in entry for entry in log[first_sum:]), "the sums start before the last reduction"
    for of, expected, got in zip(runs, at_the_end, early, strict=True):
        assert_equal_bits(got, expected, str(of))
