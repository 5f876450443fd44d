"""The scales of FP8 replicas, and the casts from the masters.

A rank casts its shard. A scale depends on the largest magnitude (amax) of a whole weight, the maximum over its shards.
Every rank computes all scales from those maxima, so sharding changes no scale and no scale is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from dtrain.distributed.communicator import Communicator, Pending
from dtrain.precision.float8.cast import E4M3, cast, scale_of
from dtrain.sharding.layout import ArenaSegment, FlatLayout, ParameterSlot, ShardInterval

_BLOCK = 1 << 17
"""Elements that are measured or cast at a time on a CPU: they stay in a core's cache."""

HEAD_ROOM = 2.0
"""Growth of a weight with a delayed scale in one update before its largest elements are clipped: this factor, or this
many times the learning rate, whichever is more. Adam changes an element by about the learning rate at most."""


@dataclass(frozen=True)
class Rectangle:
    """Whole or partial rows of a matrix: ``rows`` x ``columns`` elements from (``row``, ``column``) on."""

    row: int
    column: int
    rows: int
    columns: int
    offset: int  # of its first element in the interval

    def cut(self, limit: int) -> Iterator[Rectangle]:
        """Yields parts of at most ``limit`` elements; if there are several rows, parts of whole rows, at least one."""
        rows = max(limit // self.columns, 1)
        columns = limit if self.rows == 1 else self.columns
        for i in range(0, self.rows, rows):
            for j in range(0, self.columns, columns):
                yield Rectangle(
                    self.row + i,
                    self.column + j,
                    min(rows, self.rows - i),
                    min(columns, self.columns - j),
                    self.offset + i * self.columns + j,
                )


def rectangles(start: int, stop: int, width: int) -> Iterator[Rectangle]:
    """Yields row-major elements ``start`` to ``stop`` of a matrix with rows of ``width``, in up to three rectangles."""
    cursor = start
    while cursor < stop:
        row, column = divmod(cursor, width)
        is_partial = column > 0 or stop - cursor < width
        rows = 1 if is_partial else (stop - cursor) // width
        columns = min(width - column, stop - cursor) if is_partial else width
        yield Rectangle(row, column, rows, columns, cursor - start)
        cursor += rows * columns


class ScaleTable:
    """The scales of all FP8 weights, complete on every rank, and the largest magnitudes behind them.

    Args:
        layouts: layouts of all flat buffers; those that are not FP8 have no scales.
        rowwise: one scale for each row [N] and each column [K] of a weight [N, K], instead of one for the weight.
        device: device of the tensors.

    Attributes:
        amax: FP32 [all scales], the largest magnitudes.
        scale: FP32 [all scales], the scales of the replicas as they are now.
    """

    def __init__(self, layouts: Sequence[FlatLayout], rowwise: bool, device: torch.device) -> None:
        self.rowwise = rowwise
        self._slices: dict[str, list[slice]] = {}  # of each copy
        cursor = 0
        for slot in (slot for layout in layouts if layout.dtype == E4M3 for slot in layout.slots):
            slices = []
            for size in slot.spec.shape if rowwise else (1,):
                slices.append(slice(cursor, cursor + size))
                cursor += size
            self._slices[slot.spec.name] = slices
        self.amax = torch.zeros(cursor, dtype=torch.float32, device=device)
        self.scale = torch.ones(cursor, dtype=torch.float32, device=device)

    @property
    def names(self) -> list[str]:
        return list(self._slices)

    @property
    def num_copies(self) -> int:
        """Number of quantized copies per weight (2 for row-wise scaling)."""
        return 2 if self.rowwise else 1

    def of_copy(self, values: Tensor, name: str, copy: int) -> Tensor:
        """Returns the elements of ``values`` [all scales] that belong to a copy of weight ``name``."""
        return values[self._slices[name][copy]]


@dataclass(frozen=True)
class CastRange:
    """A range of a segment that is updated with one set of options; see :class:`UpdateSlice`."""

    decayed: bool
    start: int  # in the segment
    stop: int
    replica: Tensor | None  # of the whole segment
    scale: Tensor | None = None
    amax: Tensor | None = None


@dataclass(frozen=True)
class _Patch:
    """A rectangle of a weight in this rank's arena: ``master`` FP32 and ``values`` FP8, both [r, c].

    ``amax`` and ``scale`` are [r, 1] or [1, c]: ``axis`` is the one along which an element shares them.
    """

    master: Tensor
    values: Tensor
    amax: Tensor
    scale: Tensor
    axis: int

    def rebased(self) -> _Patch:
        """Returns the patch with tensors of offset 0, because a compiled graph is specialized on the offsets."""
        master, values, amax, scale = map(from_dlpack, (self.master, self.values, self.amax, self.scale))
        return _Patch(master, values, amax, scale, self.axis)


def _measure(master: Tensor, amax: Tensor, axis: int) -> None:
    amax.copy_(torch.maximum(amax, master.abs().amax(axis, keepdim=True)))


def _cast(master: Tensor, scale: Tensor, values: Tensor) -> None:
    values.copy_(cast(master, scale, E4M3))


@cache  # engines of one process share the graphs
def _compiled() -> tuple[Callable[[Tensor, Tensor, int], None], Callable[[Tensor, Tensor, Tensor], None]]:
    # beyond torch's limit of recompilations they run eagerly, to the same bits
    return torch.compile(_measure, dynamic=True), torch.compile(_cast, dynamic=True)


class CurrentScales:
    """Scales that depend on the very weights that are cast, so the casts wait for the maximum over the ranks.

    Args:
        table: the scales.
        segments: segments of the arena.
        master: FP32 arena of masters.
        replicas: local copies of each segment, each [segment.numel].
        comm: the ranks over which masters are sharded; None: every rank has all masters.
        compiled: compile the casts.
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
        self._measure, self._cast = _compiled() if compiled else (_measure, _cast)
        self._patches = {
            number: [
                patch.rebased() if compiled else patch for patch in self._patches_of(segment, master, replicas[number])
            ]
            for number, segment in enumerate(segments)
            if segment.layout.dtype == E4M3
        }

    def _patches_of(self, segment: ArenaSegment, master: Tensor, copies: Sequence[Tensor]) -> Iterator[_Patch]:
        local = master[segment.arena_start : segment.arena_stop]
        for interval in segment.intervals():
            for box in self._boxes(interval):
                start = interval.offset + box.offset
                elements, shape = slice(start, start + box.rows * box.columns), (box.rows, box.columns)
                for copy, values in enumerate(copies):
                    axis = 1 - copy  # rows share a scale in the first copy, columns in the second
                    first, count = (box.row, box.rows) if axis == 1 else (box.column, box.columns)
                    amax, scale = (
                        self._table.of_copy(whole, interval.spec.name, copy)[first : first + count].unsqueeze(axis)
                        for whole in (self._table.amax, self._table.scale)
                    )
                    yield _Patch(local[elements].view(shape), values[elements].view(shape), amax, scale, axis)

    def _boxes(self, interval: ShardInterval) -> Iterator[Rectangle]:
        """Yields ``interval`` in rectangles; a weight with one scale counts as a single row."""
        length = interval.stop - interval.start
        if self._table.rowwise:
            boxes = rectangles(interval.start, interval.stop, interval.spec.shape[1])
        else:
            boxes = rectangles(0, length, length)
        # blocks stay in a CPU's cache; on a GPU they would only cost launches
        limit = _BLOCK if self._table.amax.device.type == "cpu" else length
        return (part for box in boxes for part in box.cut(limit))

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
        return list(self._patches)

    def measure(self, number: int) -> None:
        for patch in self._patches[number]:
            self._measure(patch.master, patch.amax, patch.axis)

    def start_maximum(self) -> Pending:
        """Starts the maximum over the ranks; its wait sets the scales."""
        amax = self._table.amax
        if not amax.numel():
            return Pending()
        amax.nan_to_num_(nan=torch.inf, posinf=torch.inf)  # a maximum may drop a NaN
        pending = Pending() if self._comm is None else self._comm.all_reduce_max(amax, label="largest weights")
        return pending.then(self._set_scales)

    def _set_scales(self) -> None:
        self._table.scale.copy_(scale_of(self._table.amax, E4M3))

    def cast(self, number: int) -> None:
        for patch in self._patches[number]:
            self._cast(patch.master, patch.scale, patch.values)

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
        amax = self._table.amax
        # the next scale is chosen one update ahead: see HEAD_ROOM
        self._next.copy_(scale_of(torch.maximum(HEAD_ROOM * amax, amax + HEAD_ROOM * self._peak_lr), E4M3))
        scale = self._next if self._is_fresh else self._table.scale
        self._is_fresh = False
        # a cast turns Inf into 448, which would hide it
        self._table.scale.copy_(torch.where(self._next.isnan(), torch.nan, scale))

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
