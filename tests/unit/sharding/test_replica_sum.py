"""Sums over replicas: along the tree of all ranks, and parts of a shard without elements."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

from dtrain.parameters.micro_batch_weight import Weight
from dtrain.sharding import replica_sum
from dtrain.sharding.accumulate import TreeSum
from dtrain.sharding.replica_sum import RunningReplicaSum, SubtreesInFlight, TreeReplicaSum

NUMEL = 120


class FakeReplicas:
    """The replicas' communicator on one rank; ``sent`` is shared by the ranks, which push in turns."""

    def __init__(self, rank: int, world_size: int, sent: dict[int, dict[int, Tensor]]) -> None:
        self.rank, self.world_size = rank, world_size
        self._sent = sent
        self._number = 0

    def all_to_all(self, output: Tensor, input: Tensor, *_: Any, **__: Any) -> FakeReplicas._Handle:
        self._sent[self._number][self.rank] = input
        self._number += 1
        return self._Handle(self, output, self._sent[self._number - 1])

    class _Handle:
        def __init__(self, comm: FakeReplicas, output: Tensor, sent: dict[int, Tensor]) -> None:
            self._comm, self._output, self._sent = comm, output, sent

        def wait(self) -> None:
            size = self._comm.world_size
            for rank, row in enumerate(self._output.view(size, -1)):
                row.copy_(self._sent[rank].view(size, -1)[self._comm.rank])


@pytest.mark.parametrize(
    ("shard_size", "num_replicas", "num_micro_batches"), [(2, 2, 1), (2, 3, 4), (4, 5, 3), (4, 2, 3), (2, 5, 1)]
)
def test_the_tree_is_that_of_all_ranks(shard_size: int, num_replicas: int, num_micro_batches: int) -> None:
    """Also if a tree over the replicas has leftovers, in two steps, and with weights."""
    generator = torch.Generator().manual_seed(shard_size)
    world = shard_size * num_replicas
    sent: dict[int, dict[int, Tensor]] = defaultdict(dict)
    shards = [torch.empty(NUMEL) for _ in range(num_replicas)]
    comms: list[Any] = [FakeReplicas(replica, num_replicas, sent) for replica in range(num_replicas)]
    sums = [TreeReplicaSum(comm, shard, "g", SubtreesInFlight()) for comm, shard in zip(comms, shards, strict=True)]
    expected = torch.empty(NUMEL)
    whole = TreeSum(expected)
    for _ in range(2):
        for _ in range(num_micro_batches):
            grads = list(torch.randn(world, NUMEL, generator=generator).bfloat16())
            weights = [Weight(value, is_one=False) for value in torch.rand(world, generator=generator)]
            whole.push(grads, weights)
            for replica, own in enumerate(sums):
                ranks = slice(replica * shard_size, (replica + 1) * shard_size)
                own.push(grads[ranks], weights[ranks])
        whole.finish()
        for replica, own in enumerate(sums):
            own.finish()
            parts = (shard.view(num_replicas, -1)[replica] for shard in (shards[replica], expected))
            assert torch.equal(*parts), f"replica {replica}"


def test_a_part_of_an_empty_shard_lies_in_the_shard() -> None:
    """Ranks of one host read it at its offset, in memory that may end there."""
    comm: Any = FakeReplicas(1, 2, {})
    empty = torch.zeros(8)[8:]
    assert RunningReplicaSum(comm, empty, "empty")._part.storage_offset() == 8
    assert TreeReplicaSum(comm, empty, "empty", SubtreesInFlight())._part.storage_offset() == 8


@pytest.mark.parametrize("limit", [0, 3 * 4 * NUMEL, 1 << 30])
def test_what_the_buffers_have_in_flight_is_limited(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are received first, whichever buffer's; the sums stay the same."""
    monkeypatch.setattr(replica_sum, "MAX_BYTES_IN_FLIGHT", limit)
    in_flight, sent = SubtreesInFlight(), defaultdict(dict)
    comm: Any = FakeReplicas(0, 1, sent)
    shards = [torch.empty(NUMEL) for _ in range(5)]
    sums = [TreeReplicaSum(comm, shard, str(n), in_flight) for n, shard in enumerate(shards)]
    for step in range(2):
        for number, own in enumerate(sums):
            own.push([torch.full((NUMEL,), float(number + step))] * 2, [Weight(torch.ones(()), is_one=True)] * 2)
            assert in_flight._nbytes <= max(limit, 4 * NUMEL)
    for number, (own, shard) in enumerate(zip(sums, shards, strict=True)):
        own.finish()
        assert (shard == 2 * number + 2 * (number + 1)).all()
    assert in_flight._nbytes == 0
