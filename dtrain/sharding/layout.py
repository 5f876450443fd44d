"""Layout of parameters in flat buffers, and of flat buffers over ranks: arithmetic only, no tensors, no process group.

A parameter group is flattened into one flat buffer per replica dtype. Inside a flat buffer parameters are ordered by
(hyper-parameter class, definition); each class starts on a chunk, so the optimizer indexes hyper-parameters by chunk::

    flat buffer   |w0   |w1        |pad|b0|b1|pad   |padding |      numel = world_size x shard_numel
    classes       |<-- decayed ------->|<- plain -->|
    shards        |<-- rank 0 --->|<-- rank 1 ----->|<- ... >|      each a whole number of chunks

Offsets do not depend on the world size; only the padding at the end does. So every parameter has the same alignment at
every stage and size, and kernels see the same shapes: one condition for equal bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

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
    update_class: int = 0  # number of the hyper-parameter class
    trained: bool = True

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

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Row-major strides of the parameter."""
        return torch.empty(self.spec.shape, device="meta").stride()


@dataclass(frozen=True)
class ShardInterval:
    """Row-major elements ``start`` to ``stop`` of one parameter, which lie in a range of a flat buffer."""

    spec: ParamSpec
    start: int  # in the parameter
    stop: int
    offset: int  # of ``start`` from the beginning of that range


@dataclass(frozen=True)
class FlatLayout:
    """One flat buffer: the parameters of one group with one replica dtype, either trained or frozen ones."""

    group: str
    dtype: torch.dtype
    slots: tuple[ParameterSlot, ...]
    classes: tuple[tuple[int, int, int], ...]  # (number, start, stop), each a whole number of chunks
    world_size: int  # ranks that share the buffer
    num_replicas: int = 1  # which sum their shards in equal parts

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

    @cached_property
    def name(self) -> str:
        """Group and dtype, the name of this buffer in messages and collectives."""
        return f"{self.group or 'root'}/{str(self.dtype).removeprefix('torch.')}{'' if self.is_trained else '/frozen'}"

    @property
    def is_trained(self) -> bool:
        return self.slots[0].spec.trained

    @property
    def extents(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of every parameter; equal extents mean equal padding."""
        return tuple((slot.start, slot.stop) for slot in self.slots)

    @cached_property
    def places(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]:
        """Size, strides and offset of every parameter; equal for equal modules."""
        return tuple((slot.spec.shape, slot.strides, slot.start) for slot in self.slots)

    @property
    def real_numel(self) -> int:
        """Elements without the padding that the world size adds."""
        return self.classes[-1][2] if self.classes else 0

    @cached_property
    def shard_numel(self) -> int:
        # chunks whose elements divide by the replicas: any number for a power of two up to CHUNK
        multiple = self.num_replicas // math.gcd(self.num_replicas, CHUNK)
        return round_up(-(-self.real_numel // (CHUNK * self.world_size)), multiple) * CHUNK

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


def flat_layouts(
    group: str, specs: Sequence[ParamSpec], world_size: int, num_replicas: int = 1
) -> tuple[FlatLayout, ...]:
    """Returns the flat buffers of one group, one a replica dtype, the narrowest first."""
    # a stable sort: definition order within a class; the dtype's name separates dtypes of one size
    ordered = sorted(specs, key=lambda s: (s.replica_dtype.itemsize, str(s.replica_dtype), s.update_class))
    by_dtype = groupby(ordered, key=lambda s: s.replica_dtype)
    return tuple(_flat_layout(group, dtype, same_dtype, world_size, num_replicas) for dtype, same_dtype in by_dtype)


def _flat_layout(
    group: str, dtype: torch.dtype, specs: Iterable[ParamSpec], world_size: int, num_replicas: int
) -> FlatLayout:
    slots: list[ParameterSlot] = []
    classes: list[tuple[int, int, int]] = []
    cursor = 0
    for number, same_class in groupby(specs, key=lambda s: s.update_class):
        begin = cursor
        for spec in same_class:
            cursor = round_up(cursor, ALIGNMENT)  # a function of the parameters alone, so equal at every world size
            slots.append(ParameterSlot(spec, cursor))
            cursor += spec.numel
        cursor = round_up(cursor, CHUNK)
        classes.append((number, begin, cursor))
    return FlatLayout(group, dtype, tuple(slots), tuple(classes), world_size, num_replicas)


@dataclass(frozen=True)
class ArenaSegment:
    """The range of one flat buffer of which this rank holds the masters: its shard, or all of it."""

    layout: FlatLayout
    start: int  # in the flat buffer
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def of_rank(self, rank: int) -> ArenaSegment:
        """Returns the segment of another rank: the same if this one is all of the buffer, else its shard."""
        is_whole = self.numel == self.layout.numel
        return self if is_whole else ArenaSegment(self.layout, *self.layout.shard(rank))

    def of(self, flat: Tensor) -> Tensor:
        """Returns the elements of ``flat`` [layout.numel] that lie in this range."""
        return flat[self.start : self.stop]

    def shard_of(self, local: Tensor, rank: int) -> Tensor:
        """Returns the shard of ``rank`` in ``local`` [numel], the elements of this range."""
        start, stop = self.layout.shard(rank)
        return local[start - self.start : stop - self.start]

    def intervals(self) -> tuple[ShardInterval, ...]:
        """Returns the parts of parameters in this range, offsets counted from its beginning."""
        return self.layout.intervals(self.start, self.stop)

    def ranges(self, start: int, stop: int) -> tuple[tuple[str, int, int], ...]:
        """Returns (name, first element, one past the last) of each parameter in a part of the range.

        They are counted from ``start``, and include the padding up to the next multiple of ``ALIGNMENT``.
        """
        low, high = self.start + start, self.start + stop
        cut = ((s.spec.name, max(s.start, low), min(round_up(s.stop, ALIGNMENT), high)) for s in self.layout.slots)
        return tuple((name, begin - low, end - low) for name, begin, end in cut if begin < end)

    def class_ranges(self, *, padded: bool = False) -> tuple[tuple[int, int, int], ...]:
        """Returns (number, start, stop) of the hyper-parameter classes, counted from its beginning.

        If ``padded``, the last class includes the padding at the end of the flat buffer.
        """
        classes = self.layout.classes
        if padded and classes:
            classes = (*classes[:-1], (*classes[-1][:2], self.layout.numel))
        cut = ((number, max(low, self.start), min(high, self.stop)) for number, low, high in classes)
        return tuple((number, low - self.start, high - self.start) for number, low, high in cut if low < high)
