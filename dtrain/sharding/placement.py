"""ZeRO stages as data: three placements, and nothing else that knows a stage number.

Moving a tensor between placements is the whole theory (Rajbhandari et al., "ZeRO", SC 2020, section 5)::

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
    """Where the three kinds of tensors live."""

    compute: Placement
    gradient: Placement
    master: Placement

    def reduces_every_micro_batch(self, *, reproducible: bool) -> bool:
        """Whether the gradients of single micro-batches are exchanged, not each rank's FP32 sum of them."""
        return reproducible or self.gradient is Placement.SHARD


STAGES: dict[int, Placements] = {
    0: Placements(Placement.REPLICATE, Placement.REPLICATE, Placement.REPLICATE),
    1: Placements(Placement.REPLICATE, Placement.REPLICATE, Placement.SHARD),
    2: Placements(Placement.REPLICATE, Placement.SHARD, Placement.SHARD),
    3: Placements(Placement.SHARD, Placement.SHARD, Placement.SHARD),
}


def memory_formula(
    placements: Placements,
    *,
    low_numel: int,
    fp32_numel: int,
    low_bytes: int,
    world_size: int,
    float8_numel: int = 0,
    float8_bytes: int = 0,
) -> dict[str, int]:
    """Model-state bytes of one rank by the ZeRO formula, with FP32 main grads.

    Per parameter: ``low_bytes`` (4 for FP32 modules) for the compute replica, 4 for the main grad, 4 for the master and
    8 for both moments; what is sharded is divided by ``world_size``. Padding, buffers and FP8 scales are not in the
    formula.

    Args:
        placements: a row of :data:`STAGES`.
        low_numel: parameters whose replica is low, those with an FP8 one apart.
        fp32_numel: parameters whose replica is FP32.
        low_bytes: bytes of a low element.
        world_size: ranks that share.
        float8_numel: parameters whose replica is FP8.
        float8_bytes: bytes of an element of it, one for each copy.
    """
    numel = low_numel + fp32_numel + float8_numel

    def share(total: int, placement: Placement) -> int:
        return total if placement is Placement.REPLICATE else -(-total // world_size)

    return {
        "compute": share(low_numel * low_bytes + fp32_numel * 4 + float8_numel * float8_bytes, placements.compute),
        "main_grad": share(numel * 4, placements.gradient),
        "master": share(numel * 4, placements.master),
        "moments": share(numel * 8, placements.master),
    }
