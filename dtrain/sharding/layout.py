"""Layout of parameters in flat buffers and in the arena: arithmetic only, no tensors, no process group.

A parameter group is flattened into one flat buffer per replica dtype. Inside a flat buffer parameters are ordered by
(hyper-parameter class, definition); each class starts on a chunk, so the optimizer indexes hyper-parameters by chunk::

    flat buffer   |w0   |w1        |pad|b0|b1|pad   |padding |      numel = world_size x shard_numel
    classes       |<-- decayed ------->|<- plain -->|
    shards        |<-- rank 0 --->|<-- rank 1 ----->|<- ... >|      each a whole number of chunks

Offsets do not depend on the world size; only the padding at the end does. So every parameter has the same alignment at
every stage and size, and kernels see the same shapes: one condition for equal bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import torch

_T = TypeVar("_T")

CHUNK = 1024
"""Elements of one chunk, the unit of sharding, of hyper-parameters and of the norm's partial sums."""

ALIGNMENT = 64
"""Each parameter starts on a multiple of this number of elements (128 bytes in BF16), which fast kernels need."""


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class ParamSpec:
    """Properties of a parameter that decide its place in the layout."""

    name: str
    shape: tuple[int, ...]
    replica_dtype: torch.dtype
    decayed: bool  # the hyper-parameter class: weight decay or none

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class ParameterSlot:
    """Elements ``start`` to ``stop`` of a flat buffer, which hold one parameter."""

    spec: ParamSpec
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.spec.numel


@dataclass(frozen=True)
class ShardInterval:
    """Row-major elements ``start`` to ``stop`` of one parameter, which lie in a range of a flat buffer."""

    spec: ParamSpec
    start: int  # in the parameter
    stop: int
    offset: int  # of ``start`` from the beginning of that range


@dataclass(frozen=True)
class FlatLayout:
    """One flat buffer: the parameters of one group with one replica dtype."""

    group: str
    dtype: torch.dtype
    slots: tuple[ParameterSlot, ...]
    classes: tuple[tuple[bool, int, int], ...]  # (decayed, start, stop), each a whole number of chunks
    world_size: int

    def __post_init__(self) -> None:
        cursor = 0
        for slot in self.slots:
            if slot.start < cursor or slot.start % ALIGNMENT:
                raise ValueError(
                    f"slot '{slot.spec.name}' starts at {slot.start}; expected an aligned start >= {cursor}"
                )
            cursor = slot.stop
        if any(start % CHUNK or stop % CHUNK for _, start, stop in self.classes) or cursor > self.real_numel:
            raise ValueError(f"classes {self.classes} do not cover whole chunks up to {cursor}")

    @property
    def name(self) -> str:
        """Group and dtype, the name of this buffer in messages and collectives."""
        return f"{self.group or 'root'}/{str(self.dtype).removeprefix('torch.')}"

    @property
    def extents(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of every parameter; equal extents mean equal padding."""
        return tuple((slot.start, slot.stop) for slot in self.slots)

    @property
    def real_numel(self) -> int:
        """Elements without the padding that the world size adds."""
        return self.classes[-1][2] if self.classes else 0

    @property
    def shard_numel(self) -> int:
        return round_up(self.real_numel // CHUNK, self.world_size) // self.world_size * CHUNK

    @property
    def numel(self) -> int:
        return self.shard_numel * self.world_size

    def shard(self, rank: int) -> tuple[int, int]:
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def intervals(self, start: int, stop: int) -> tuple[ShardInterval, ...]:
        """Returns the parts of parameters that lie between ``start`` and ``stop`` of the buffer."""
        found = []
        for slot in self.slots:
            begin, end = max(slot.start, start), min(slot.stop, stop)
            if begin < end:
                found.append(ShardInterval(slot.spec, begin - slot.start, end - slot.start, begin - start))
        return tuple(found)


def flat_layouts(group: str, specs: Sequence[ParamSpec], world_size: int) -> tuple[FlatLayout, ...]:
    """Returns the flat buffers of one group, one a replica dtype, the narrowest first."""
    # a stable sort: definition order within a class; the dtype's name separates dtypes of one size
    ordered = sorted(specs, key=lambda s: (s.replica_dtype.itemsize, str(s.replica_dtype), not s.decayed))
    by_dtype = groupby(ordered, key=lambda s: s.replica_dtype)
    return tuple(_flat_layout(group, dtype, same_dtype, world_size) for dtype, same_dtype in by_dtype)


def _flat_layout(group: str, dtype: torch.dtype, specs: Iterable[ParamSpec], world_size: int) -> FlatLayout:
    slots: list[ParameterSlot] = []
    classes: list[tuple[bool, int, int]] = []
    cursor = 0
    for decayed, same_class in groupby(specs, key=lambda s: s.decayed):
        begin = cursor
        for spec in same_class:
            cursor = round_up(cursor, ALIGNMENT)  # a function of the parameters alone, so equal at every world size
            slots.append(ParameterSlot(spec, cursor))
            cursor += spec.numel
        cursor = round_up(cursor, CHUNK)
        classes.append((decayed, begin, cursor))
    return FlatLayout(group, dtype, tuple(slots), tuple(classes), world_size)


@dataclass(frozen=True)
class ArenaSegment:
    """The range of one flat buffer that lies in this rank's arena."""

    layout: FlatLayout
    arena_start: int
    flat_start: int  # begin of the range in the flat buffer
    numel: int

    @property
    def arena_stop(self) -> int:
        return self.arena_start + self.numel

    def intervals(self) -> tuple[ShardInterval, ...]:
        """Returns the parts of parameters in this segment, offsets counted from its beginning."""
        return self.layout.intervals(self.flat_start, self.flat_start + self.numel)

    def class_ranges(self) -> tuple[tuple[bool, int, int], ...]:
        """Returns (decayed, start, stop) of the hyper-parameter classes, counted from its beginning."""
        return self._cut(self.layout.classes)

    def slot_ranges(self) -> tuple[tuple[ParameterSlot, int, int], ...]:
        """Returns (slot, start, stop) of each parameter with the padding after it, counted from its beginning."""
        ends = [*(slot.start for slot in self.layout.slots[1:]), self.layout.real_numel]
        return self._cut((slot, slot.start, end) for slot, end in zip(self.layout.slots, ends, strict=True))

    def _cut(self, ranges: Iterable[tuple[_T, int, int]]) -> tuple[tuple[_T, int, int], ...]:
        low, high = self.flat_start, self.flat_start + self.numel
        cut = ((what, max(start, low) - low, min(stop, high) - low) for what, start, stop in ranges)
        return tuple((what, start, stop) for what, start, stop in cut if start < stop)


@dataclass(frozen=True)
class ArenaLayout:
    """One rank's contiguous arena: the segments of all flat buffers, in their order."""

    segments: tuple[ArenaSegment, ...]

    @staticmethod
    def of(layouts: Iterable[FlatLayout], rank: int, *, sharded: bool) -> ArenaLayout:
        """Returns the arena of ``rank``: its shards, or the whole buffers if the masters are replicated."""
        segments, cursor = [], 0
        for layout in layouts:
            start, stop = layout.shard(rank) if sharded else (0, layout.numel)
            segments.append(ArenaSegment(layout, cursor, start, stop - start))
            cursor += stop - start
        return ArenaLayout(tuple(segments))

    @property
    def numel(self) -> int:
        return self.segments[-1].arena_stop if self.segments else 0
