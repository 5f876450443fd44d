"""The scales of FP8 replicas, and the casts from the masters.

A rank casts its shard. Scales follow from the largest magnitudes of whole weights, the maxima over the shards; every
rank computes all of them, so that sharding changes nothing and no scale travels.
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
"""How much a weight with a delayed scale may grow in one update before its largest elements are clipped: this factor,
or this many times the learning rate, whichever is more. Adam changes an element by about the learning rate at most."""


@dataclass(frozen=True)
class Rectangle:
    """Whole or partial rows of a matrix: ``rows`` x ``columns`` elements from (``row``, ``column``) on."""

    row: int
    column: int
    rows: int
    columns: int
    offset: int  # of its first element in the stretch

    def cut(self, limit: int) -> Iterator[Rectangle]:
        """In parts of at most ``limit`` elements; of whole rows where there are several, though they be longer."""
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
    """The row-major stretch ``start`` to ``stop`` of a matrix with rows of ``width``, in at most three rectangles."""
    cursor = start
    while cursor < stop:
        row, column = divmod(cursor, width)
        is_partial = column > 0 or stop - cursor < width
        rows = 1 if is_partial else (stop - cursor) // width
        columns = min(width - column, stop - cursor) if is_partial else width
        yield Rectangle(row, column, rows, columns, cursor - start)
        cursor += rows * columns


class ScaleTable:
    """The scales of all FP8 weights, whole on every rank, and the magnitudes that they follow from.

    Args:
        layouts: of all flat buffers; those that are not FP8 have no scales.
        rowwise: one scale for each row [N] and each column [K] of a weight [N, K], not one a weight.
        device: of the tensors.

    Attributes:
        amax: FP32 [all scales]: the largest magnitudes.
        scale: FP32 [all scales]: of the replicas as they are now.
    """

    def __init__(self, layouts: Sequence[FlatLayout], rowwise: bool, device: torch.device) -> None:
        self.rowwise = rowwise
        self._places: dict[str, list[slice]] = {}  # of each copy
        cursor = 0
        for slot in (slot for layout in layouts if layout.dtype == E4M3 for slot in layout.slots):
            places = []
            for size in slot.spec.shape if rowwise else (1,):
                places.append(slice(cursor, cursor + size))
                cursor += size
            self._places[slot.spec.name] = places
        self.amax = torch.zeros(cursor, dtype=torch.float32, device=device)
        self.scale = torch.ones(cursor, dtype=torch.float32, device=device)

    @property
    def names(self) -> list[str]:
        """Of the weights, in their order in the table."""
        return list(self._places)

    @property
    def num_copies(self) -> int:
        """Of every weight."""
        return 2 if self.rowwise else 1

    def of_copy(self, values: Tensor, name: str, copy: int) -> Tensor:
        """That part of ``values`` [all scales] which belongs to a copy of weight ``name``."""
        return values[self._places[name][copy]]


@dataclass(frozen=True)
class Cast:
    """A stretch of a segment, and what the update makes of its masters; see :class:`UpdateSlice`."""

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
        """The same for compiled functions, which know the offsets of their inputs."""
        master, values, amax, scale = map(from_dlpack, (self.master, self.values, self.amax, self.scale))
        return _Patch(master, values, amax, scale, self.axis)


def _measure(master: Tensor, amax: Tensor, axis: int) -> None:
    amax.copy_(torch.maximum(amax, master.abs().amax(axis, keepdim=True)))


def _cast(master: Tensor, scale: Tensor, values: Tensor) -> None:
    values.copy_(cast(master, scale, E4M3))


@cache
def _compiled() -> tuple[Callable[[Tensor, Tensor, int], None], Callable[[Tensor, Tensor, Tensor], None]]:
    """Both functions, once in a process; a shape too many runs uncompiled, to the same bits."""
    return torch.compile(_measure, dynamic=True), torch.compile(_cast, dynamic=True)


class CurrentScales:
    """Scales that follow from the weights which are cast, so the casts wait for the maximum over the ranks.

    Args:
        table: of the scales.
        segments: of the arena.
        master: the arena, FP32.
        replicas: the copies of each segment, each [segment.numel].
        comm: the ranks that share the masters; None: each has them all.
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
        own = master[segment.arena_start : segment.arena_stop]
        for part in segment.intervals():
            for box in self._boxes(part):
                start = part.offset + box.offset
                place, shape = slice(start, start + box.rows * box.columns), (box.rows, box.columns)
                for copy, values in enumerate(copies):
                    axis = 1 - copy  # rows share a scale in the first copy, columns in the second
                    first, count = (box.row, box.rows) if axis == 1 else (box.column, box.columns)
                    amax, scale = (
                        self._table.of_copy(whole, part.spec.name, copy)[first : first + count].unsqueeze(axis)
                        for whole in (self._table.amax, self._table.scale)
                    )
                    yield _Patch(own[place].view(shape), values[place].view(shape), amax, scale, axis)

    def _boxes(self, part: ShardInterval) -> Iterator[Rectangle]:
        """``part`` in rectangles; where a weight has one scale, as one row of their own."""
        length = part.stop - part.start
        if self._table.rowwise:
            boxes = rectangles(part.start, part.stop, part.spec.shape[1])
        else:
            boxes = rectangles(0, length, length)
        limit = _BLOCK if self._table.amax.device.type == "cpu" else length
        return (piece for box in boxes for piece in box.cut(limit))

    @property
    def num_copies(self) -> int:
        """Of every weight."""
        return self._table.num_copies

    @property
    def held(self) -> list[Tensor]:
        """The tensors that this needs at all times."""
        return [self._table.amax, self._table.scale]

    def casts(self, number: int) -> list[Cast]:
        """What the update makes of segment ``number``: masters only, here."""
        return [Cast(*found, None) for found in self._segments[number].class_ranges()]

    def begin(self, skipped: Tensor | None) -> list[int]:
        """Before a refresh; the segments that are measured, and cast after the exchange, by this.

        Args:
            skipped: of the update that casts: whether it changes nothing, 0-dim; None: there is no update.
        """
        self._table.amax.zero_()
        return list(self._patches)

    def measure(self, number: int) -> None:
        """Takes the masters of segment ``number`` into account."""
        for patch in self._patches[number]:
            self._measure(patch.master, patch.amax, patch.axis)

    def exchange(self) -> Pending:
        """Starts the maximum over the ranks; the scales follow once it has been waited for."""
        amax = self._table.amax
        if not amax.numel():
            return Pending()
        amax.nan_to_num_(nan=torch.inf, posinf=torch.inf)  # a maximum may drop a NaN
        pending = Pending() if self._comm is None else self._comm.all_reduce_max(amax, label="largest weights")
        return pending.then(self._settle)

    def _settle(self) -> None:
        self._table.scale.copy_(scale_of(self._table.amax, E4M3))

    def cast(self, number: int) -> None:
        """Casts the masters of segment ``number``."""
        for patch in self._patches[number]:
            self._cast(patch.master, patch.scale, patch.values)

    def saved(self) -> dict[str, float] | None:
        """What a checkpoint needs beside the masters: nothing, here."""
        return None

    def restore(self, saved: Mapping[str, float] | None) -> None:
        """Takes back what :meth:`saved` gave, before a refresh without an update."""


class DelayedScales(CurrentScales):
    """Scales that follow from the weights before the update, with head room, so that the update casts in its own pass.

    One scale a weight. The scale of the next cast is a function of the masters and the learning rate alone; the one in
    force is not, because it was chosen an update ago, so a checkpoint holds it.

    Args:
        peak_lr: the largest learning rate, by which a weight of zeros, or of very small numbers, may outgrow any
            factor. Beyond the head room (a schedule above its peak, a rare gradient with a large second beta) elements
            are clipped for one step.
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
        self._is_fresh = True

    @property
    def held(self) -> list[Tensor]:
        """The tensors that this needs at all times."""
        return [*super().held, self._next]

    def casts(self, number: int) -> list[Cast]:
        """The update casts each weight with its scale, and measures it."""
        (replica,) = self._replicas[number]

        def of_slot(slot: ParameterSlot, start: int, stop: int) -> Cast:
            scale, amax = (
                self._table.of_copy(whole, slot.spec.name, 0)[0] for whole in (self._table.scale, self._table.amax)
            )
            return Cast(slot.spec.decayed, start, stop, replica, scale, amax)

        return [of_slot(*found) for found in self._segments[number].slot_ranges()]

    def begin(self, skipped: Tensor | None) -> list[int]:
        """An update casts with the next scale; one that changes nothing with the old one, so that no bit changes."""
        measured = super().begin(skipped)
        if skipped is None:
            return measured
        scale = self._table.scale
        scale.copy_(torch.where(skipped != 0, scale, self._next))
        return []

    def _settle(self) -> None:
        amax = self._table.amax
        self._next.copy_(scale_of(torch.maximum(HEAD_ROOM * amax, amax + HEAD_ROOM * self._peak_lr), E4M3))
        scale = self._next if self._is_fresh else self._table.scale
        self._is_fresh = False
        # the cast has made 448 of an Inf, or will
        self._table.scale.copy_(torch.where(self._next.isnan(), torch.nan, scale))

    def saved(self) -> dict[str, float] | None:
        """{weight: scale in force}; without those of weights that are not finite."""
        scales = zip(self._table.names, self._table.scale.tolist(), strict=True)
        return {name: scale for name, scale in scales if math.isfinite(scale)}

    def restore(self, saved: Mapping[str, float] | None) -> None:
        """The scales in force are the saved ones; fresh ones where others were saved, or none."""
        names = self._table.names
        self._is_fresh = saved is None or saved.keys() != set(names)
        if saved is not None and not self._is_fresh:
            self._table.scale.copy_(torch.tensor([saved[name] for name in names]))
