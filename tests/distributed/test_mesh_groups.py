"""The process groups and the memory of a mesh's axes: made once, alike for all groups of an axis, released."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtrain.distributed import processes, shared_memory
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.mesh import Mesh
from dtrain.distributed.ring_exchange import RingExchange
from dtrain.distributed.setup import make_communicator
from dtrain.errors import DivergenceError
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Result, Run, start, train_engine

pytestmark = pytest.mark.processes

CPU = torch.device("cpu")
RUN = Run("transformer", steps=3, accumulation=2, options={"precision": "bf16", "shard_size": 2, "zero_stage": 2})


def other_groups(rank: int, world: int) -> list[list[int]]:
    # such as of the leaders of the hosts; torch counts it in the names of the next groups of its members only
    dist.new_group([0, 2], timeout=timedelta(seconds=5))
    mesh = Mesh.of(make_communicator(dist.group.WORLD, CPU), 2)
    return [axis.gather_rows(torch.tensor([rank]), label="ranks").flatten().tolist() for axis in axes(mesh)]


def axes(mesh: Mesh) -> tuple[Communicator, Communicator]:
    return mesh.shard, mesh.replicate


def test_ranks_may_be_in_other_process_groups() -> None:
    results = run_ranks(4, other_groups, timeout=30)
    assert results == [[[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]]]


def several_engines(rank: int, world: int) -> tuple[list[int], list[bool], bool, bool]:
    comm = make_communicator(dist.group.WORLD, CPU)
    groups, foreign = [], []
    for _ in range(2):
        train_engine(start(RUN, comm=comm), RUN)
        groups.append(len(dist.distributed_c10d._world.pg_names))
        foreign.append(comm.foreign_nbytes() > 0)
    mesh = Mesh.of(make_communicator(dist.group.WORLD, CPU), 2)
    groups.append(len(dist.distributed_c10d._world.pg_names))
    is_other = mesh.shard is not Mesh.of(comm, 2).shard
    own = axes(Mesh.of(comm, 2))
    comm.release()
    return groups, foreign, is_other, all(axis.process_group is None for axis in own)


def test_engines_share_the_groups_of_an_axis() -> None:
    """torch keeps a group until all end. Pages of other ranks that are read in place are no memory of this rank."""
    assert run_ranks(4, several_engines) == [([3, 3, 3], [True, True], True, True)] * 4


def on_hosts(rank: int, world: int, hosts: list[int]) -> tuple[list[str], Result]:
    identity, memory = ["host", str(hosts[rank])], f"host {hosts[rank]}"
    processes.host_identity = lambda: identity
    shared_memory._host_of_memory = lambda: memory  # type: ignore[attr-defined]
    engine = start(RUN)
    return [type(axis).__name__ for axis in axes(engine.mesh)], train_engine(engine, RUN)


def assert_equal_bits(result: Result, other: Result) -> None:
    assert result.outcomes == other.outcomes
    for name, master in other.masters.items():
        assert torch.equal(result.masters[name], master), name


def test_an_axis_shares_memory_if_all_its_groups_can() -> None:
    """Two hosts of two ranks; hosts of three and one, of which one group could; one host. The bits are the same."""
    kinds = {
        (0, 0, 1, 1): ["HostMemory", "GlooGroup"],
        (0, 0, 0, 1): ["GlooGroup", "GlooGroup"],
        (0, 0, 0, 0): ["HostMemory", "HostMemory"],
    }
    results = {hosts: run_ranks(4, on_hosts, list(hosts)) for hosts in kinds}
    for hosts, of_ranks in results.items():
        assert [kind for kind, _ in of_ranks] == [kinds[hosts]] * 4
        assert_equal_bits(of_ranks[0][1], results[0, 0, 0, 0][0][1])


def short_memory(rank: int, world: int, bad_rank: int) -> tuple[bool, Result]:
    if rank == bad_rank:
        os.posix_fallocate = _fail  # type: ignore[assignment]
    engine = start(RUN)
    return isinstance(engine.sharded.reducer.exchange, RingExchange), train_engine(engine, RUN)


def _fail(*_: Any) -> None:
    raise OSError(28, "injected")


def test_all_replicas_send_through_sockets_if_memory_is_short_in_one() -> None:
    """A replica that still shared memory would issue other collectives than the one that cannot."""
    expected = run_ranks(4, short_memory, -1)
    results = run_ranks(4, short_memory, 3)
    assert [in_place for in_place, _ in expected + results] == [True] * 4 + [False] * 4
    assert_equal_bits(results[0][1], expected[0][1])


def other_collectives(rank: int, world: int) -> str:
    mesh = Mesh.of(make_communicator(dist.group.WORLD, CPU), 2)
    try:
        mesh.shard.gather_rows(torch.zeros(1), label="lost" if rank == 3 else "found")
    except DivergenceError as error:
        return str(error)
    return ""


def test_messages_name_the_ranks_of_the_run() -> None:
    """Not those of the group, in which ranks 2 and 3 are 0 and 1."""
    _, _, *messages = run_ranks(4, other_collectives)
    for message in messages:
        assert "rank 2 is at gather_rows(found, 1 x float32), rank 3 is at gather_rows(lost, 1 x float32)" in message
