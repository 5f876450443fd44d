"""The casts of a rank's shards of FP8 weights: tensor code, or Triton kernels on a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dtrain.precision.float8.cast import BLOCK, E4M3, Scaling, cast, decode
from dtrain.sharding.layout import ArenaSegment, FlatLayout, ShardInterval, round_up

_ALIGNMENT = 4
"""Scales of rows start on a multiple of this number (16 bytes): [Note: rules of scaled_mm]."""

_AT_A_TIME = 1 << 17
"""Elements that are measured or cast at a time on a CPU: they stay in a core's cache."""


@dataclass(frozen=True)
class Rectangle:
    """Whole or partial rows of a matrix: ``rows`` x ``columns`` elements from (``row``, ``column``) on."""

    row: int
    column: int
    rows: int
    columns: int
    offset: int  # of its first element in the interval

    def rows_of_blocks(self) -> Iterator[Rectangle]:
        """Yields parts of whole rows, each in one row of blocks."""
        row = 0
        while row < self.rows:
            rows = min(BLOCK - (self.row + row) % BLOCK, self.rows - row)
            yield Rectangle(self.row + row, self.column, rows, self.columns, self.offset + row * self.columns)
            row += rows

    def spans(self) -> Iterator[slice]:
        """Yields its columns in up to three parts: whole blocks together, and what is left of a block on each side."""
        stop = self.column + self.columns
        first, last = min(round_up(self.column, BLOCK), stop), max(stop - stop % BLOCK, self.column)
        for low, high in ((self.column, first), (first, last), (max(first, last), stop)):
            if low < high:
                yield slice(low - self.column, high - self.column)

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
        scaling: which elements of a weight share a scale.
        device: device of the tensors.
        has_columns: False: row-wise scales for each row alone, of a single copy.

    Attributes:
        amax: FP32 [all scales], the largest magnitudes; 0 between the scales of rows of two copies.
        scale: FP32 [all scales], the scales of the replicas as they are now.
        scaling: see above.
        num_copies: number of quantized copies per weight (2 for row-wise scaling of rows and columns).
    """

    def __init__(
        self, layouts: Sequence[FlatLayout], scaling: Scaling, device: torch.device, *, has_columns: bool = True
    ) -> None:
        self.scaling = scaling
        self.num_copies = 2 if scaling is Scaling.ROWS and has_columns else 1
        self._places: dict[str, list[tuple[slice, tuple[int, ...]]]] = {}  # of each copy
        cursor = 0
        for slot in (slot for layout in layouts if layout.dtype == E4M3 for slot in layout.slots):
            rows, columns = slot.spec.shape
            places = []
            for sides in ((rows, columns), (columns, rows))[: self.num_copies]:
                shape = scaling.shape(*sides)
                size = math.prod(shape)
                places.append((slice(cursor, cursor + size), shape))
                cursor += round_up(size, _ALIGNMENT) if shape else 1
            self._places[slot.spec.name] = places
        self.amax = torch.zeros(cursor, dtype=torch.float32, device=device)
        self.scale = torch.ones(cursor, dtype=torch.float32, device=device)

    @property
    def names(self) -> Iterable[str]:
        return self._places

    def first_scales(self, name: str) -> list[int]:
        """Returns the index of the first scale of each copy of weight ``name``."""
        return [place.start for place, _ in self._places[name]]

    def scales_of(self, name: str) -> list[Tensor]:
        """Returns the scales of the copies of weight ``name``, in the shapes that ``Scaling`` gives."""
        return [self.scale[place].view(shape) for place, shape in self._places[name]]

    def of_copy(self, values: Tensor, name: str, copy: int) -> Tensor:
        """Returns the elements of ``values`` [all scales] that belong to a copy of weight ``name``."""
        return values[self._places[name][copy][0]]


@dataclass(frozen=True)
class Float8Shard:
    """This rank's shard of an FP8 flat buffer.

    Attributes:
        segment: its position in the flat buffer.
        master: FP32 [segment.numel], the masters.
        copies: the quantized copies, each E4M3 [segment.numel].
    """

    segment: ArenaSegment
    master: Tensor
    copies: Sequence[Tensor]


@dataclass(frozen=True)
class _Patch:
    """A rectangle of a weight in a shard: ``master`` FP32 and ``values`` FP8, both [r, c] or [r, blocks, c].

    ``amax`` and ``scale`` broadcast to them: they have one element along the ``axes`` along which it is shared.
    """

    master: Tensor
    values: Tensor
    amax: Tensor
    scale: Tensor
    axes: tuple[int, ...]

    def in_blocks(self, box: Rectangle, span: slice, across: int) -> _Patch:
        """Returns the part in columns ``span`` of ``box``; ``amax`` and ``scale`` are given for the whole weight."""
        first = box.column + span.start
        width = min(BLOCK, span.stop - span.start)
        count = (span.stop - span.start) // width
        number = box.row // BLOCK * across + first // BLOCK
        master, values = (tensor[:, span].unflatten(1, (count, width)) for tensor in (self.master, self.values))
        amax, scale = (tensor[number : number + count].view(1, count, 1) for tensor in (self.amax, self.scale))
        return _Patch(master, values, amax, scale, (0, 2))


class TensorCasts:
    """Measures and casts the masters with tensor code, one rectangle of a weight at a time.

    Args:
        table: the scales.
        shards: this rank's shards of all FP8 weights.
    """

    def __init__(self, table: ScaleTable, shards: Sequence[Float8Shard]) -> None:
        self._table = table
        self._patches = [patch for shard in shards for patch in self._patches_of(shard)]

    def _patches_of(self, shard: Float8Shard) -> Iterator[_Patch]:
        for interval in shard.segment.intervals():
            for box in self._boxes(interval):
                start = interval.offset + box.offset
                elements, shape = slice(start, start + box.rows * box.columns), (box.rows, box.columns)
                for copy, values in enumerate(shard.copies):
                    amax, scale = (
                        self._table.of_copy(whole, interval.spec.name, copy)
                        for whole in (self._table.amax, self._table.scale)
                    )
                    patch = _Patch(shard.master[elements].view(shape), values[elements].view(shape), amax, scale, ())
                    if self._table.scaling.in_blocks:
                        across = -(-interval.spec.shape[1] // BLOCK)
                        yield from (patch.in_blocks(box, span, across) for span in box.spans())
                    else:  # rows share a scale in the first copy, columns in the second
                        place = (slice(box.row, box.row + box.rows), slice(box.column, box.column + box.columns))[copy]
                        axis = 1 - copy
                        amax, scale = amax[place].unsqueeze(axis), scale[place].unsqueeze(axis)
                        yield replace(patch, amax=amax, scale=scale, axes=(axis,))

    def _boxes(self, interval: ShardInterval) -> Iterator[Rectangle]:
        """Yields ``interval`` in rectangles; a weight with one scale counts as a single row.

        With a scale for each block, each lies in one row of blocks.
        """
        length, width = interval.stop - interval.start, interval.spec.shape[1]
        if self._table.scaling is Scaling.TENSOR:
            boxes: Iterable[Rectangle] = rectangles(0, length, length)
        else:
            boxes = rectangles(interval.start, interval.stop, width)
        if self._table.scaling.in_blocks:
            return (part for box in boxes for part in box.rows_of_blocks())
        # small parts stay in a CPU's cache; on a GPU they would only cost launches
        limit = _AT_A_TIME if self._table.amax.device.type == "cpu" else length
        return (part for box in boxes for part in box.cut(limit))

    def measure(self) -> None:
        """Adds the masters to the largest magnitudes of the table."""
        for patch in self._patches:
            largest = patch.master.abs().amax(patch.axes, keepdim=True)
            patch.amax.copy_(torch.maximum(patch.amax, largest))

    def cast(self) -> None:
        """Casts the masters into the copies with the scales of the table."""
        for patch in self._patches:
            patch.values.copy_(cast(patch.master, patch.scale, E4M3))

    def invert(self) -> None:
        """Fills the masters with the values that the copies represent."""
        for patch in self._patches:
            patch.master.copy_(decode(patch.values) * patch.scale)


class KernelCasts:
    """Measures and casts the masters of all shards with a launch each; see ``TensorCasts``."""

    def __init__(self, table: ScaleTable, shards: Sequence[Float8Shard]) -> None:
        from dtrain.kernels.float8 import ShardCasts, WeightShard  # they import Triton, which only GPUs need

        self._table = table
        weights = []
        for shard in shards:
            for interval in shard.segment.intervals():
                spec = interval.spec
                elements = slice(interval.offset, interval.offset + interval.stop - interval.start)
                copies = [copy[elements] for copy in shard.copies]
                first_scales = table.first_scales(spec.name)
                weights.append(WeightShard(shard.master[elements], copies, interval.start, spec.shape[1], first_scales))
        self._casts = ShardCasts(weights, table.scaling.value)

    def measure(self) -> None:
        self._casts.measure(self._table.amax)

    def cast(self) -> None:
        self._casts.cast(self._table.scale)
