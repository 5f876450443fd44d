"""The two axes of the ranks in hybrid sharding: ``dp_replicate`` x ``dp_shard``, as PyTorch names them.

Consecutive ranks share the states of one replica; ranks at the same place of each replica hold the same shard::

    shard_size=2, 4 ranks      dp_shard ->
    dp_replicate   replica 0:  rank 0  rank 1
                   replica 1:  rank 2  rank 3
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from dtrain.distributed.communicator import Communicator
from dtrain.distributed.transport.single_rank import SingleRank
from dtrain.errors import ContractError


@dataclass(frozen=True)
class Mesh:
    """Communicators over all ranks and over this rank's row and column of the mesh; they share one schedule.

    Attributes:
        world: all ranks: votes, audits and checkpoints.
        shard: the ranks that share the states of this rank's replica; without hybrid sharding ``world``.
        replicate: the ranks that hold the same shard as this one, in the order of replicas; a single rank without
            hybrid sharding.
    """

    world: Communicator
    shard: Communicator
    replicate: Communicator

    @staticmethod
    def of(world: Communicator, shard_size: int | None) -> Mesh:
        """Returns the mesh of replicas of ``shard_size`` ranks; None: one replica. All ranks call."""
        if shard_size is None or shard_size == world.world_size:
            # with a schedule of its own: what a single rank sums with itself is no collective of the run
            return Mesh(world, world, SingleRank(world.device))
        return Mesh(world, *world.split(shard_size))

    @property
    def is_hybrid(self) -> bool:
        return self.replicate.world_size > 1

    def describe(self) -> str:
        """Returns the axes, and the ranks that rank 0 communicates with, as a line for people."""
        size = self.shard.world_size
        return (
            f"mesh: dp_replicate {self.replicate.world_size} x dp_shard {size}; rank 0 shards with ranks "
            f"{_listed(range(size))}, and sums the shard with ranks {_listed(range(0, self.world.world_size, size))}"
        )

    def check(self, num_replicas: int) -> None:
        """Asserts that the live process groups are those of ``num_replicas`` replicas of equal size.

        Raises:
            ContractError: naming the axis, and the ranks that its group has and must have.
        """
        if self.world.process_group is None:  # a single rank, or one that is planned
            return
        everyone = dist.get_process_group_ranks(self.world.process_group)
        size = self.world.world_size // num_replicas
        first = self.world.rank - self.world.rank % size
        expected = {
            "dp_shard": everyone[first : first + size],
            "dp_replicate": everyone[self.world.rank % size :: size],
        }
        for (name, ranks), axis in zip(expected.items(), (self.shard, self.replicate), strict=True):
            group = axis.process_group
            found = [everyone[self.world.rank]] if group is None else dist.get_process_group_ranks(group)
            if found != ranks:
                raise ContractError(
                    f"rank {self.world.rank}: {name} has ranks {found}, but {num_replicas} replicas of {size} ranks "
                    f"have {ranks}"
                )


def _listed(ranks: range) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]}, {ranks[1]}, {ranks[2]}, ... {ranks[-1]}"
