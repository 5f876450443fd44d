"""The scales of FP8 replicas, and the casts from the masters.

A rank casts its shard. A scale depends on the largest magnitude (amax) of a whole weight, the maximum over its shards.
Every rank computes all scales from those maxima, so sharding changes no scale and no scale is sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtrain.distributed.communicator import Communicator, Pending
from dtrain.precision.float8.cast import E4M3, scale_of, uses_kernels
from dtrain.sharding.float8_casts import KernelCasts, ScaleTable, TensorCasts
from dtrain.sharding.layout import ArenaSegment, ParameterSlot

HEAD_ROOM = 2.0
"""Growth of a weight with a delayed scale in one update before its largest elements are clipped: this factor, or this
many times the learning rate, whichever is more. Adam changes an element by about the learning rate at most."""


@dataclass(frozen=True)
class CastRange:
    """A range of a segment that is updated with one set of options; see :class:`UpdateSlice`."""

    decayed: bool
    start: int  # in the segment
    stop: int
    replica: Tensor | None  # of the whole segment
    scale: Tensor | None = None
    amax: Tensor | None = None


class CurrentScales:
    """Scales that depend on the very weights that are cast, so the casts wait for the maximum over the ranks.

    Args:
        table: the scales.
        segments: segments of the arena.
        master: FP32 arena of masters.
        replicas: local copies of each segment, each [segment.numel].
        comm: the ranks over which masters are sharded; None: every rank has all masters.
        compiled: compile the casts; on a GPU they are Triton kernels then, a launch for all weights.
    """

    def __init__(
        self,
        table: ScaleTable,
        segments: Sequence[ArenaSegment],
        master: Tensor,
        replicas: Sequence[Sequence[Tensor]],
        comm: Communicator | None,
        *,
        compiled: bool = False,
    ) -> None:
        self._table = table
        self._segments = segments
        self._replicas = replicas
        self._comm = comm
        self._float8 = [number for number, segment in enumerate(segments) if segment.layout.dtype == E4M3]
        self._uses_kernels = uses_kernels(master.device, compiled=compiled)
        self._casts: KernelCasts | TensorCasts
        if self._uses_kernels:
            self._casts = KernelCasts(table, segments, master, replicas)
        else:
            self._casts = TensorCasts(table, segments, master, replicas, compiled=compiled)

    @property
    def num_copies(self) -> int:
        return self._table.num_copies

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that are held at all times."""
        return [self._table.amax, self._table.scale]

    def cast_ranges(self, number: int) -> list[CastRange]:
        """Returns the ranges of segment ``number`` for the update, which casts none of them."""
        return [CastRange(*found, None) for found in self._segments[number].class_ranges()]

    def begin(self, skipped: Tensor | None) -> list[int]:
        """Begins a refresh; returns the segments whose cast is deferred until the maximum over the ranks is known.

        Args:
            skipped: whether the update changes nothing, 0-dim; None: there is no update.
        """
        self._table.amax.zero_()
        return list(self._float8)

    def measure(self, numbers: Sequence[int]) -> None:
        """Adds the masters of segments ``numbers``, of those that :meth:`begin` returned, to the largest magnitudes."""
        self._casts.measure(numbers)

    def start_maximum(self) -> Pending:
        """Starts the maximum over the ranks; its wait sets the scales."""
        amax = self._table.amax
        if not amax.numel():
            return Pending()
        amax.nan_to_num_(nan=torch.inf, posinf=torch.inf)  # a maximum may drop a NaN
        pending = Pending() if self._comm is None else self._comm.all_reduce_max(amax, label="largest weights")
        return pending.then(self._set_scales)

    def _set_scales(self) -> None:
        if self._uses_kernels:
            from dtrain.kernels.float8 import set_scales

            set_scales(self._table.amax, self._table.scale)
        else:
            self._table.scale.copy_(scale_of(self._table.amax, E4M3))

    def cast(self, numbers: Sequence[int]) -> None:
        """Casts the masters of segments ``numbers`` into the replicas, with the scales of the maximum."""
        self._casts.cast(numbers)

    def saved(self) -> dict[str, float] | None:
        """Returns what a checkpoint must hold besides the masters: nothing."""
        return None

    def restore(self, saved: Mapping[str, float] | None) -> None:
        """Restores the result of :meth:`saved`, before a refresh without an update."""


class DelayedScales(CurrentScales):
    """Scales that depend on the weights before the update, with head room, so that the update itself casts.

    Each weight has one scale. The scale of the next cast is a function of the masters and the learning rate. The
    current scale is not, because it was chosen one update earlier, so a checkpoint holds it.

    Args:
        peak_lr: largest learning rate, by which a weight of zeros or of very small numbers may outgrow any factor.
            Beyond the head room (a schedule above its peak, a rare gradient with a large second beta) elements are
            clipped for one step.
        table, segments, master, replicas, comm, compiled: as for :class:`CurrentScales`.
    """

    def __init__(
        self,
        table: ScaleTable,
        segments: Sequence[ArenaSegment],
        master: Tensor,
        replicas: Sequence[Sequence[Tensor]],
        comm: Communicator | None,
        *,
        peak_lr: float,
        compiled: bool = False,
    ) -> None:
        super().__init__(table, segments, master, replicas, comm, compiled=compiled)
        self._peak_lr = peak_lr
        self._next = torch.ones_like(table.scale)
        self._is_fresh = True  # the current scales are to be computed, not kept

    @property
    def tensors(self) -> list[Tensor]:
        return [*super().tensors, self._next]

    def cast_ranges(self, number: int) -> list[CastRange]:
        """Returns one range for each weight: the update casts it with its scale and measures it."""
        (replica,) = self._replicas[number]

        def of_slot(slot: ParameterSlot, start: int, stop: int) -> CastRange:
            scale, amax = (
                self._table.of_copy(whole, slot.spec.name, 0)[0] for whole in (self._table.scale, self._table.amax)
            )
            return CastRange(slot.spec.decayed, start, stop, replica, scale, amax)

        return [of_slot(*found) for found in self._segments[number].slot_ranges()]

    def begin(self, skipped: Tensor | None) -> list[int]:
        """Moves to the next scales unless the update is skipped, when no bit may change; an update defers nothing."""
        measured = super().begin(skipped)
        if skipped is None:
            return measured
        scale = self._table.scale
        # on the device, which alone knows the decision; in place, because the update's slices hold views
        scale.copy_(torch.where(skipped != 0, scale, self._next))
        return []

    def _set_scales(self) -> None:
        amax, scale, is_fresh = self._table.amax, self._table.scale, self._is_fresh
        self._is_fresh = False
        # the next scale is chosen one update ahead: see HEAD_ROOM
        factor, addend = HEAD_ROOM, HEAD_ROOM * self._peak_lr
        if self._uses_kernels:
            from dtrain.kernels.float8 import set_delayed_scales

            set_delayed_scales(amax, factor, addend, scale, self._next, is_fresh=is_fresh)
        else:
            self._next.copy_(scale_of(torch.maximum(factor * amax, amax + addend), E4M3))
            # a cast turns Inf into 448, which would hide it
            scale.copy_(torch.where(self._next.isnan(), torch.nan, self._next if is_fresh else scale))

    def saved(self) -> dict[str, float] | None:
        """Returns {weight: current scale}, without scales that are not finite, which JSON cannot hold."""
        scales = zip(self._table.names, self._table.scale.tolist(), strict=True)
        return {name: scale for name, scale in scales if math.isfinite(scale)}

    def restore(self, saved: Mapping[str, float] | None) -> None:
        """Restores the saved scales; if they belong to other weights, or there are none, fresh ones are computed."""
        names = self._table.names
        self._is_fresh = saved is None or saved.keys() != set(names)
        if saved is not None and not self._is_fresh:
            self._table.scale.copy_(torch.tensor([saved[name] for name in names]))
