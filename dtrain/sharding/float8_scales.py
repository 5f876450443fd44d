"""The scales of FP8 replicas, and the casts from the masters.

A rank casts its shards. A scale depends on the largest magnitude (amax) of a whole weight, the maximum over its shards.
Every rank computes all scales from those maxima, so sharding changes no scale and no scale is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dtrain.distributed.communicator import Communicator, Handle
from dtrain.precision.float8.cast import E4M3, scale_of, uses_kernels
from dtrain.precision.float8.proof import proves_weights
from dtrain.sharding.float8_casts import Float8Shard, KernelCasts, ScaleTable, TensorCasts
from dtrain.sharding.layout import ArenaSegment


class Float8Scales:
    """Refreshes the scales and the replicas: ``measure``, then ``cast``, with other work between them.

    The maximum over the ranks is reduced in the meantime. Without FP8 weights both do nothing.

    Args:
        table: the scales.
        shards: this rank's shards of all FP8 flat buffers.
        comm: the ranks over which masters are sharded; None: every rank has all masters.
        compiled: cast by Triton kernels on a GPU, with a launch for all weights.
    """

    def __init__(
        self, table: ScaleTable, shards: Sequence[Float8Shard], comm: Communicator | None, *, compiled: bool = False
    ) -> None:
        self._table = table
        self._comm = comm
        self._uses_kernels = uses_kernels(table.amax.device, compiled=compiled) and (
            not table.amax.numel() or proves_weights(table.amax, table.scaling)
        )
        self._casts: KernelCasts | TensorCasts
        if self._uses_kernels:
            self._casts = KernelCasts(table, shards)
        else:
            self._casts = TensorCasts(table, shards)
        self._maximum: Handle | None = None

    @property
    def num_copies(self) -> int:
        return self._table.num_copies

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that are held at all times."""
        return [self._table.amax, self._table.scale]

    def measure(self) -> None:
        """Measures the masters and starts the maximum over the ranks; all ranks call."""
        amax = self._table.amax
        if not amax.numel():
            return
        amax.zero_()
        self._casts.measure()
        amax.nan_to_num_(nan=torch.inf, posinf=torch.inf)  # a maximum may drop a NaN
        if self._comm is not None:
            self._maximum = self._comm.all_reduce_max(amax, label="largest weights")

    def cast(self) -> None:
        """Waits for the maximum, sets the scales and casts the masters into the copies."""
        if self._maximum is not None:
            self._maximum.wait()
            self._maximum = None
        amax, scale = self._table.amax, self._table.scale
        if not amax.numel():
            return
        if self._uses_kernels:
            from dtrain.kernels.float8 import set_scales

            set_scales(amax, scale)
        else:
            scale.copy_(scale_of(amax, E4M3))
        self._casts.cast()

    def cast_again(self, segment: ArenaSegment, master: Tensor) -> list[Tensor]:
        """Returns what the copies of one FP8 shard must be, from its ``master`` and the scales as they are now.

        Tensor code, whatever casts the replicas: the bits are the same.
        """
        copies = [torch.zeros(segment.numel, dtype=E4M3, device=master.device) for _ in range(self.num_copies)]
        TensorCasts(self._table, [Float8Shard(segment, master, copies)]).cast()
        return copies

    def by_weight(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yields (name, scales, what they must be by the largest magnitudes) of each copy of each FP8 weight."""
        for name in self._table.names:
            for copy in range(self.num_copies):
                amax, scale = (self._table.of_copy(t, name, copy) for t in (self._table.amax, self._table.scale))
                yield name, scale, scale_of(amax, E4M3)
