"""Frozen weights that are held in FP8 only: cast once, one byte an element, without masters."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dtrain.checkpoint.snapshot import TensorShard
from dtrain.distributed.communicator import Communicator
from dtrain.precision.float8.cast import E4M3
from dtrain.sharding.float8_casts import Float8Shard, ScaleTable, TensorCasts
from dtrain.sharding.float8_scales import Float8Scales
from dtrain.sharding.group import tensor_shard
from dtrain.sharding.layout import ArenaSegment
from dtrain.sharding.replicas import Replica, slot_views

FROZEN = "frozen"


class FrozenFloat8:
    """The frozen FP8 weights of one group: a replica of one copy, and its scales.

    What they represent, an FP8 number times a power of two, is exact in BF16. So a checkpoint holds BF16, and casting
    that again gives the same weights.

    Args:
        replica: the copy, whole or this rank's shard.
        segment: the range of the flat buffer that this rank holds.
        table: the scales of these weights alone.
        comm: the ranks.
    """

    def __init__(self, replica: Replica, segment: ArenaSegment, table: ScaleTable, comm: Communicator) -> None:
        self.replica = replica
        self._segment = segment
        self._table = table
        self._comm = comm

    @property
    def name(self) -> str:
        return self.replica.layout.name

    @property
    def names(self) -> list[str]:
        return list(self.replica.views.parameters)

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that this rank holds beside those of the replica."""
        return [self._table.scale]

    def codes(self) -> Iterator[TensorShard]:
        """Yields what this rank holds of the weights, E4M3, then their scales: the live tensors."""
        yield from self.shards(self.replica.local[0])
        for name in self._table.names:
            scale = self._table.of_copy(self._table.scale, name, 0)
            yield TensorShard(name, "frozen_scale", tuple(scale.shape), scale.dtype, 0, scale.numel(), scale)

    def new_values(self) -> Tensor:
        """Returns FP32 zeros for ``write``."""
        return torch.zeros(self._segment.numel, dtype=torch.float32, device=self._comm.device)

    def shards(self, values: Tensor) -> Iterator[TensorShard]:
        """Yields the weights in ``values``, which is laid out as this rank's part of the replica."""
        for interval in self._segment.intervals():
            yield tensor_shard(FROZEN, interval, values)

    def write(self, values: Tensor) -> None:
        """Casts FP32 ``values``, laid out as ``new_values``, with scales of their own; all ranks call."""
        table = self._table
        table.amax = torch.zeros_like(table.scale)
        # tensor code, because it runs once
        scales = Float8Scales(table, [self._shard(values)], self._comm if self.replica.is_sharded else None)
        scales.measure()
        scales.cast()
        table.amax = table.amax.new_empty(0)  # row by row it would take as much as the scales, for good

    def is_cast_of(self, values: Tensor) -> bool:
        """Whether the weights are those that ``write`` makes of ``values`` with the scales in force."""
        expected = Float8Scales(self._table, [], None).cast_again(self._segment, values)[0]
        return torch.equal(expected.view(torch.uint8), self.replica.local[0].view(torch.uint8))

    def values(self) -> Tensor:
        """Returns what this rank's part of the weights represents, FP32, laid out as ``new_values``."""
        values = self.new_values()
        TensorCasts(self._table, [self._shard(values)]).invert()
        return values

    def saved_shards(self) -> Iterator[TensorShard]:
        """Yields what this rank saves, in BF16: its shard; if all ranks hold the whole, rank 0 does."""
        if self.is_saved_here:
            yield from self.shards(self.values().bfloat16())

    @property
    def is_saved_here(self) -> bool:
        """Whether this rank saves what it holds."""
        return self.replica.is_sharded or self._comm.rank == 0

    def full(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, FP32 weight in full); all ranks call."""
        layout, full = self._segment.layout, self.values()
        if self.replica.is_sharded:
            shard, full = full, full.new_empty(layout.numel)
            self._comm.all_gather(full, shard, label=f"full {layout.name}").wait()
        for slot, values in zip(layout.slots, slot_views(full, layout), strict=True):
            yield slot.spec.name, values

    def _shard(self, values: Tensor) -> Float8Shard:
        assert self.replica.layout.dtype == E4M3
        return Float8Shard(self._segment, values, self.replica.local)
