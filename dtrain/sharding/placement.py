"""ZeRO stages as a table of placements, which alone knows their numbers, and the kinds of gradients as another table.

Communication is what moves a tensor between placements (Rajbhandari et al., "ZeRO", SC 2020, section 5)::

    partial sum -> SHARD       reduce-scatter, or an all-to-all and a local sum
    SHARD       -> REPLICATE   all-gather
    partial sum -> REPLICATE   both: all-reduce
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from dtrain.config.engines import Native
from dtrain.distributed.mesh import Mesh
from dtrain.sharding.layout import ArenaSegment, FlatLayout


class Placement(Enum):
    """Whether every rank holds the whole tensor or its shard."""

    REPLICATE = "replicate"
    SHARD = "shard"

    def segment(self, layout: FlatLayout, rank: int) -> ArenaSegment:
        """Returns the range of a flat buffer that ``rank`` holds; the shard of a single rank is the whole buffer."""
        return ArenaSegment(layout, *((0, layout.numel) if self is Placement.REPLICATE else layout.shard(rank)))

    def nbytes(self, total: int, num_ranks: int) -> int:
        """Returns the part of ``total`` bytes that a rank holds, rounded up, as shards are padded to equal sizes."""
        return total if self is Placement.REPLICATE else -(-total // num_ranks)


@dataclass(frozen=True)
class Placements:
    """Placement of compute replicas, gradients and masters (the optimizer states lie with the masters)."""

    compute: Placement
    gradient: Placement
    master: Placement

    def reduces_every_micro_batch(self, *, reproducible: bool, grad_dtype: str) -> bool:
        """Whether several ranks send each micro-batch's gradient, and not their FP32 sums over micro-batches."""
        return reproducible or grad_dtype == "bf16" or self.gradient is Placement.SHARD


STAGES: dict[int, Placements] = {
    # compute replica, gradient, master
    0: Placements(Placement.REPLICATE, Placement.REPLICATE, Placement.REPLICATE),
    1: Placements(Placement.REPLICATE, Placement.REPLICATE, Placement.SHARD),
    2: Placements(Placement.REPLICATE, Placement.SHARD, Placement.SHARD),
    3: Placements(Placement.SHARD, Placement.SHARD, Placement.SHARD),
}


class Send(Enum):
    """How the gradients of a flat buffer leave this rank."""

    LOCAL = "accumulated on this rank, and reduce-scattered once a step"
    EXCHANGED = "sent to the owners of their shards in each micro-batch"


class Sum(Enum):
    """How gradients are summed."""

    RUNNING = "FP32, each as it arrives"
    TREE = "FP32, along one tree over all micro-batches"
    ROUNDED = "FP32, rounded to BF16 main grads when it is stored; FP32 main grads as RUNNING"
    HOST = "FP32, on the host"


class Join(Enum):
    """When the sums of the replicas of hybrid sharding are joined."""

    NONE = "there is one replica"
    AT_END = "once a step"
    DURING_BACKWARD = "after each micro-batch, as parts of the tree"


class GradientKind(NamedTuple):
    """The three choices that make up a gradient."""

    send: Send
    sum: Sum
    join: Join = Join.NONE


GRADIENTS: dict[tuple[str, ...], GradientKind] = {
    # the first row whose conditions all hold; what is summed over ranks is rounded where it is summed, at the owner
    ("reproducible", "hybrid"): GradientKind(Send.EXCHANGED, Sum.TREE, Join.DURING_BACKWARD),
    ("reproducible",): GradientKind(Send.EXCHANGED, Sum.TREE),
    ("offloaded",): GradientKind(Send.EXCHANGED, Sum.HOST),
    ("bf16 main grads", "single rank"): GradientKind(Send.LOCAL, Sum.ROUNDED),
    ("bf16 main grads",): GradientKind(Send.EXCHANGED, Sum.ROUNDED),
    ("single rank",): GradientKind(Send.LOCAL, Sum.RUNNING),
    ("sharded", "hybrid"): GradientKind(Send.EXCHANGED, Sum.RUNNING, Join.AT_END),
    ("sharded",): GradientKind(Send.EXCHANGED, Sum.RUNNING),
    ("hybrid",): GradientKind(Send.LOCAL, Sum.RUNNING, Join.AT_END),
    (): GradientKind(Send.LOCAL, Sum.RUNNING),
}


def gradient_kind(options: Native, mesh: Mesh, *, is_offloaded: bool) -> GradientKind:
    """Returns the row of ``GRADIENTS`` for a run; ``is_offloaded``: main grads are on the host."""
    holds = {
        "sharded": STAGES[options.zero_stage].gradient is Placement.SHARD,
        "single rank": mesh.shard.world_size == 1,
        "hybrid": mesh.is_hybrid,
        "reproducible": options.reproducible,
        "bf16 main grads": options.grad_dtype == "bf16",
        "offloaded": is_offloaded,
    }
    return next(kind for conditions, kind in GRADIENTS.items() if all(holds[name] for name in conditions))


def memory_formula(
    placements: Placements,
    *,
    numel: int,
    state_bytes: int,
    replica_bytes: int = 0,
    fp32_numel: int = 0,
    frozen_bytes: int = 0,
    num_ranks: int = 1,
    paired_numel: int = 0,
    grad_bytes: int | None = None,
) -> dict[str, int]:
    """Returns the model-state bytes of one rank by the ZeRO formula, with FP32 masters.

    What is sharded is divided by ``num_ranks``. An FP32 replica is the storage of the masters that a rank holds, so it
    adds only what the rank does not hold as masters. A BF16 replica may be a half of them, and counts as replica: the
    master adds its 16-bit remainder. Padding, buffers and FP8 scales are not in the formula.

    Args:
        placements: a row of ``STAGES``.
        numel: number of trained parameters.
        state_bytes: bytes of the optimizer states of all parameters; 8 x numel for AdamW.
        replica_bytes: bytes of all compute replicas that are not FP32.
        fp32_numel: number of trained parameters with an FP32 replica.
        frozen_bytes: bytes of all frozen parameters.
        num_ranks: number of ranks.
        paired_numel: number of trained parameters whose master is the replica and a remainder.
        grad_bytes: bytes of all main grads; None: they are FP32.
    """

    def held(total: int, placement: Placement) -> int:
        return placement.nbytes(total, num_ranks)

    fp32_bytes = 4 * fp32_numel
    return {
        "compute": held(replica_bytes, placements.compute)
        + held(fp32_bytes, placements.compute)
        - held(fp32_bytes, placements.master),
        "main_grad": held(numel * 4 if grad_bytes is None else grad_bytes, placements.gradient),
        "master": held(numel * 4 - paired_numel * 2, placements.master),
        "moments": held(state_bytes, placements.master),
        "frozen": held(frozen_bytes, placements.compute),
    }
