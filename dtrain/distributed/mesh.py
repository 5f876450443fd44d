"""The two axes of the ranks in hybrid sharding: ``dp_replicate`` x ``dp_shard``, as PyTorch names them.

Consecutive ranks share the states of one replica; ranks at the same place of each replica hold the same shard::

    shard_size=2, 4 ranks      dp_shard ->
    dp_replicate   replica 0:  rank 0  rank 1
                   replica 1:  rank 2  rank 3
"""

from __future__ import annotations

from dataclasses import dataclass

from dtrain.distributed.communicator import Communicator
from dtrain.distributed.single_rank import SingleRank


@dataclass(frozen=True)
class Mesh:
    """Communicators over all ranks and over this rank's row and column; they share one schedule.

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
            return Mesh(world, world, SingleRank(world.device, world.schedule))
        return Mesh(world, *world.split(shard_size))

    @property
    def is_hybrid(self) -> bool:
        return self.replicate.world_size > 1
