"""Where gradient leaves lie while they travel: in private buffers, or in a ring that the other ranks read.

In the ring the leaves of a micro-batch lie one after the other, in the order in which they are sent. A rank that has
started exchange number j has read all leaves up to j - window; so when it hears that all ranks have started j, they
have read those too, and a stretch of memory last used by leaf number s may be written again after exchange s + window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dtrain.distributed.communicator import Communicator, Pending
from dtrain.sharding.layout import FlatLayout
from dtrain.sharding.replicas import BufferPool

MAX_BYTES_IN_FLIGHT = 64 * 2**20
"""Leaves that may be under way before backward waits for the oldest: small ones gain from overlap, large ones must not
pile up."""

Take = Callable[[Sequence[Tensor]], None]
"""Uses this rank's slice of every rank's leaf, in rank order, before it returns."""


class MicroBatchGradient(Protocol):
    """The leaves of one flat buffer, one a micro-batch."""

    nbytes: int  # held while one is under way

    def open(self) -> Tensor:
        """A leaf [numel] in the reduce dtype to be filled; zero in its padding."""

    def exchange(self, leaf: Tensor, take: Take) -> Pending:
        """Starts sending each rank its slice; once it has been waited for, ``take`` has used what arrived here."""


@dataclass(frozen=True)
class MicroBatchGradientSpec:
    """What lies in a leaf buffer."""

    layout: FlatLayout
    dtype: torch.dtype  # on the wire

    @property
    def nbytes(self) -> int:
        """Bytes of a leaf."""
        return self.layout.numel * self.dtype.itemsize


class MicroBatchGradientBuffers:
    """The leaf buffers of one rank.

    Args:
        comm: who exchanges.
        specs: in the order in which the leaves of a micro-batch are sent.
        num_last: the last so many are opened early in backward and sent at its end.

    Attributes:
        buffers: one for each of ``specs``.
    """

    def __init__(self, comm: Communicator, specs: Sequence[MicroBatchGradientSpec], num_last: int) -> None:
        self._pool = BufferPool(comm.device)
        self._ring: Tensor | None = None
        self.buffers: list[MicroBatchGradient] = [_PrivateGradient(spec, comm, self._pool) for spec in specs]
        if specs and comm.may_share:
            schedule = RingSchedule([spec.nbytes for spec in specs], num_last, MAX_BYTES_IN_FLIGHT)
            memory = comm.allocate(schedule.capacity, torch.uint8)
            if comm.is_shared(memory):
                self._ring = memory
                ring = _GradientRing(comm, memory, schedule)
                self.buffers = [_RingGradient(number, spec, ring, self._pool) for number, spec in enumerate(specs)]

    def idle(self) -> list[Tensor]:
        """The memory that nobody uses now: between steps, all of it."""
        return self._pool.idle() if self._ring is None else [self._ring, *self._pool.idle()]


class _PrivateGradient:
    """A leaf that is sent from memory of this rank alone."""

    def __init__(self, spec: MicroBatchGradientSpec, comm: Communicator, pool: BufferPool) -> None:
        self._spec = spec
        self._comm = comm
        self._pool = pool
        self.nbytes = spec.nbytes * (1 if comm.world_size == 1 else 2)  # sent and received

    def open(self) -> Tensor:
        layout = self._spec.layout
        return self._pool.take(layout.extents, layout.numel, self._spec.dtype)

    def exchange(self, leaf: Tensor, take: Take) -> Pending:
        layout = self._spec.layout
        received = None
        if self._comm.world_size > 1:
            received = self._pool.take("received", layout.numel, self._spec.dtype)

        def give_back() -> None:
            self._pool.give(layout.extents, leaf)
            if received is not None:
                self._pool.give("received", received)

        return self._comm.all_to_all_single(leaf, take, label=layout.name, received=received).then(give_back)


@dataclass(frozen=True)
class RingSlot:
    """The place of one leaf in the ring: bytes ``start`` to ``stop``, free once exchange ``free_after`` is complete."""

    start: int
    stop: int
    free_after: int  # negative: at once


class RingSchedule:
    """Where leaf number n (0, 1, ... over all micro-batches) lies in the ring; pure arithmetic, equal on all ranks.

    The last leaves of a micro-batch are opened before the others are sent, so they have two places of their own. The
    others go round a ring that is long enough for ``window + 2`` of them in a row, or for all of two micro-batches.

    Args:
        sizes: bytes of the leaves of one micro-batch in the order in which they are sent.
        num_last: how many of them are opened early.
        limit: bytes that may be under way.
    """

    def __init__(self, sizes: Sequence[int], num_last: int, limit: int) -> None:
        self._sizes = sizes
        self.cycle = len(sizes)
        self.window = next((w for w in range(self.cycle, 2, -1) if _longest_run(sizes, w) <= limit), min(2, self.cycle))
        self._num_ring = self.cycle - num_last
        ring, last = sizes[: self._num_ring], sizes[self._num_ring :]
        self._split = 0
        if ring:
            self._split = min(2 * sum(ring), _longest_run(ring, self.window + 2) + max(ring))
        self.capacity = self._split + 2 * sum(last)
        self._cursors = [0, self._split]  # of the ring, and of the last leaves
        self._stretches: dict[int, RingSlot] = {}
        self._next = 0

    def place(self, number: int) -> RingSlot:
        """The place of leaf ``number``, which has not been forgotten."""
        while self._next <= number:
            self._stretches[self._next] = self._append()
            self._next += 1
        return self._stretches[number]

    def _append(self) -> RingSlot:
        index = self._next % self.cycle
        part = int(index >= self._num_ring)
        low, high = ((0, self._split), (self._split, self.capacity))[part]
        start = self._cursors[part]
        if start + self._sizes[index] > high:
            start = low
        stop = self._cursors[part] = start + self._sizes[index]
        overlapping = [n for n, other in self._stretches.items() if other.start < stop and start < other.stop]
        return RingSlot(start, stop, max(overlapping) + self.window if overlapping else -1)

    def forget(self, number: int) -> None:
        """Leaves up to ``number`` have been read by all ranks."""
        for old in [n for n in self._stretches if n <= number]:
            del self._stretches[old]


def _longest_run(sizes: Sequence[int], count: int) -> int:
    """The largest sum of ``count`` consecutive ``sizes``, which repeat."""
    return max(sum(sizes[(first + i) % len(sizes)] for i in range(count)) for first in range(len(sizes)))


class _GradientRing:
    """The ring's memory, and the exchanges under way from it.

    No deadlock: a rank waits only for exchanges that it has started itself, and all start them in one order.
    """

    def __init__(self, comm: Communicator, memory: Tensor, schedule: RingSchedule) -> None:
        self._comm = comm
        self._memory = memory
        self._schedule = schedule
        self._num_started = 0
        self._under_way: deque[tuple[int, Pending]] = deque()

    def next_number(self, index: int) -> int:
        """The number of the next leaf of place ``index`` in the cycle."""
        cycle = self._schedule.cycle
        return self._num_started + (index - self._num_started) % cycle

    def open(self, number: int, dtype: torch.dtype) -> Tensor | None:
        """The place of leaf ``number``, to be written; None if it is so early that no wait would free it.

        Gradients arrive at other times on ranks whose graphs differ, so nothing may be sent from here.
        """
        stretch = self._schedule.place(number)
        if stretch.free_after >= self._num_started:
            return None
        if any(started <= stretch.free_after and not pending.is_sent for started, pending in self._under_way):
            return None
        self._complete(stretch.free_after)
        return self._view(stretch, dtype)

    def exchange(self, number: int, leaf: Tensor, take: Take, label: str) -> Pending:
        """Starts the exchange of ``leaf``, which lies in its place or elsewhere."""
        stretch, window = self._schedule.place(number), self._schedule.window
        self._complete(max(stretch.free_after, self._num_started - window))
        place = self._view(stretch, leaf.dtype)
        if place.data_ptr() != leaf.data_ptr():
            place.copy_(leaf)
        pending = self._comm.all_to_all_single(place, take, label=label)
        self._under_way.append((self._num_started, pending))
        self._schedule.forget(self._num_started - 2 * window)  # exchange number started - window is complete
        self._num_started += 1
        return pending

    def _complete(self, number: int) -> None:
        while self._under_way and self._under_way[0][0] <= number:
            self._under_way.popleft()[1].wait()

    def _view(self, stretch: RingSlot, dtype: torch.dtype) -> Tensor:
        return self._memory[stretch.start : stretch.stop].view(dtype)


class _RingGradient:
    """A leaf in the ring; where its place is not free yet when it is opened, in private memory until it is sent."""

    def __init__(self, index: int, spec: MicroBatchGradientSpec, ring: _GradientRing, pool: BufferPool) -> None:
        self._index = index
        self._spec = spec
        self._ring = ring
        self._pool = pool
        self.nbytes = spec.nbytes
        self._number = 0
        self._private: Tensor | None = None
        extents = spec.layout.extents
        ends = [0, *(stop for _, stop in extents)]
        starts = [*(start for start, _ in extents), spec.layout.numel]
        self._gaps = [(low, high) for low, high in zip(ends, starts, strict=True) if low < high]

    def open(self) -> Tensor:
        layout = self._spec.layout
        self._number = self._ring.next_number(self._index)
        leaf = self._ring.open(self._number, self._spec.dtype)
        if leaf is None:
            self._private = self._pool.take(layout.extents, layout.numel, self._spec.dtype)
            return self._private
        for low, high in self._gaps:  # other leaves lay here
            leaf[low:high].zero_()
        return leaf

    def exchange(self, leaf: Tensor, take: Take) -> Pending:
        pending = self._ring.exchange(self._number, leaf, take, self._spec.layout.name)
        if self._private is not None:
            self._pool.give(self._spec.layout.extents, self._private)
            self._private = None
        return pending
