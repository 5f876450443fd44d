"""ZeRO stages as a table of placements; no other module of this package knows a stage number.

Communication is what moves a tensor between placements (Rajbhandari et al., "ZeRO", SC 2020, section 5)::

    partial sum -> REPLICATE   all-reduce
    partial sum -> SHARD       reduce-scatter
    SHARD       -> REPLICATE   all-gather
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Placement(Enum):
    """Whether every rank holds the whole tensor or its shard."""

    REPLICATE = "replicate"
    SHARD = "shard"


@dataclass(frozen=True)
class Placements:
    """Placement of compute replicas, gradients and masters (the moments lie with the masters)."""

    compute: Placement
    gradient: Placement
    master: Placement

    def reduces_every_micro_batch(self, *, reproducible: bool) -> bool:
        """Whether each micro-batch's gradient is reduced, instead of a rank's FP32 sum over its micro-batches."""
        return reproducible or self.gradient is Placement.SHARD

    def shares_fp32_storage(self, world_size: int) -> bool:
        """Whether an FP32 compute replica is its master's storage, because this rank holds the same elements of both.

        True at stages 0 and 3, and on a single rank. See [Note: FP32 replicas] in ``sharding.state``.
        """
        return world_size == 1 or self.compute is self.master


STAGES: dict[int, Placements] = {
    # compute replica, gradient, master
    0: Placements(Placement.REPLICATE, Placement.REPLICATE, Placement.REPLICATE),
    1: Placements(Placement.REPLICATE, Placement.REPLICATE, Placement.SHARD),
    2: Placements(Placement.REPLICATE, Placement.SHARD, Placement.SHARD),
    3: Placements(Placement.SHARD, Placement.SHARD, Placement.SHARD),
}


def memory_formula(
    placements: Placements,
    *,
    reduced_numel: int,
    fp32_numel: int,
    reduced_bytes: int,
    world_size: int,
    float8_numel: int = 0,
    float8_copies: int = 1,
) -> dict[str, int]:
    """Returns the model-state bytes of one rank by the ZeRO formula, with FP32 main grads.

    Bytes per parameter: ``reduced_bytes`` for the compute replica, 4 for the main grad, 4 for the master and 8 for both
    moments; what is sharded is divided by ``world_size``. An FP32 replica has 4 bytes, or none if it is its master's
    storage (see :meth:`Placements.shares_fp32_storage`). Padding, buffers and FP8 scales are not in the formula.

    Args:
        placements: a row of :data:`STAGES`.
        reduced_numel: number of parameters with a replica in BF16 or FP16.
        fp32_numel: number of parameters with an FP32 replica.
        reduced_bytes: bytes of an element in BF16 or FP16.
        world_size: number of ranks.
        float8_numel: number of parameters with an FP8 replica.
        float8_copies: quantized copies of each of them, one byte an element.
    """
    numel = reduced_numel + fp32_numel + float8_numel
    fp32_bytes = 0 if placements.shares_fp32_storage(world_size) else 4

    def per_rank(total: int, placement: Placement) -> int:  # rounded up, as shards are padded to equal sizes
        return total if placement is Placement.REPLICATE else -(-total // world_size)

    replicas = reduced_numel * reduced_bytes + fp32_numel * fp32_bytes + float8_numel * float8_copies
    return {
        "compute": per_rank(replicas, placements.compute),
        "main_grad": per_rank(numel * 4, placements.gradient),
        "master": per_rank(numel * 4, placements.master),
        "moments": per_rank(numel * 8, placements.master),
    }
