"""The process groups and the memory of a mesh's axes: made once, alike for all groups of an axis, released."""

from __future__ import annotations

import os
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dtrain.distributed import processes
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.mesh import Mesh
from dtrain.distributed.transport import shared_memory
from dtrain.distributed.transport.choose import make_communicator
from dtrain.distributed.transport.ring_exchange import RingExchange
from dtrain.errors import DivergenceError
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Result, Run, start, train_engine

pytestmark = pytest.mark.processes

CPU = torch.device("cpu")
RUN = Run("transformer", steps=2, accumulation=2, options={"precision": "bf16", "shard_size": 2, "zero_stage": 2})


def axes(mesh: Mesh) -> tuple[Communicator, Communicator]:
    return mesh.shard, mesh.replicate


def other_groups(rank: int, world: int) -> tuple[list[list[int]], str]:
    # such as of the leaders of the hosts; torch counts it in the names of the next groups of its members only
    dist.new_group([0, 2], timeout=timedelta(seconds=5))
    mesh = Mesh.of(make_communicator(dist.group.WORLD, CPU), 2)
    members = [axis.gather_rows(torch.tensor([rank]), label="ranks").flatten().tolist() for axis in axes(mesh)]
    try:
        mesh.shard.gather_rows(torch.zeros(1), label="lost" if rank == 3 else "found")
    except DivergenceError as error:
        return members, str(error)
    return members, ""


def test_ranks_may_be_in_other_groups_and_messages_name_the_ranks_of_the_run() -> None:
    """Not those of the group, in which ranks 2 and 3 are 0 and 1."""
    results = run_ranks(4, other_groups, timeout=60)
    low, high, even, odd = [0, 1], [2, 3], [0, 2], [1, 3]
    assert [members for members, _ in results] == [[low, even], [low, odd], [high, even], [high, odd]]
    assert [message for _, message in results[:2]] == [""] * 2
    for _, message in results[2:]:
        assert "rank 2 is at gather_rows(found, 1 x float32), rank 3 is at gather_rows(lost, 1 x float32)" in message


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


def on_hosts(rank: int, world: int, hosts: list[int] | None) -> tuple[list[str], bool, Result]:
    """``hosts`` of the ranks; None: one host, and memory is short on the last rank."""
    with pytest.MonkeyPatch.context() as patch:
        if hosts is not None:
            patch.setattr(processes, "host_identity", lambda: ["host", str(hosts[rank])])
            patch.setattr(shared_memory, "_host_of_memory", lambda: f"host {hosts[rank]}")
        elif rank == world - 1:
            patch.setattr(os, "posix_fallocate", mock.Mock(side_effect=OSError(28, "injected")))
        engine = start(RUN)
        is_ring = isinstance(engine.sharded.reducer.exchange, RingExchange)
        return [type(axis).__name__ for axis in axes(engine.states.mesh)], is_ring, train_engine(engine, RUN)


def test_an_axis_shares_memory_if_all_its_groups_can() -> None:
    """Two hosts of two ranks; hosts of three and one, of which one group could; one host. The bits are the same.

    If memory is short in one replica, all send through sockets: one that still shared memory would issue other
    collectives than the one that cannot.
    """
    one_host = (0, 0, 0, 0)
    kinds: dict[tuple[int, ...] | None, tuple[list[str], bool]] = {
        one_host: (["HostMemory", "HostMemory"], True),
        (0, 0, 1, 1): (["HostMemory", "GlooGroup"], True),
        (0, 0, 0, 1): (["GlooGroup", "GlooGroup"], False),
        None: (["HostMemory", "HostMemory"], False),
    }
    results = {hosts: run_ranks(4, on_hosts, hosts and list(hosts)) for hosts in kinds}
    expected = results[one_host][0][2]
    for hosts, of_ranks in results.items():
        assert [(kind, is_ring) for kind, is_ring, _ in of_ranks] == [kinds[hosts]] * 4, hosts
        assert of_ranks[0][2].outcomes == expected.outcomes
        for name, master in expected.masters.items():
            assert torch.equal(of_ranks[0][2].masters[name], master), name
