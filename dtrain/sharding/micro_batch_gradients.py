"""Buffers of unreduced micro-batch gradients, in private memory or in slots of a ring that the other ranks read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dtrain.distributed.communicator import Communicator, Pending
from dtrain.sharding.layout import FlatLayout
from dtrain.sharding.replicas import BufferPool
from dtrain.sharding.ring_buffer import ConsumeShards, RingBuffer, RingSchedule

MAX_BYTES_IN_FLIGHT = 64 * 2**20
"""Bytes of unreduced gradients that may be in flight before backward waits for the oldest.

Small ones gain from overlap, large ones must not pile up.
"""


class MicroBatchGradient(Protocol):
    """The unreduced gradient of one flat buffer, for one micro-batch after the other."""

    nbytes: int  # held while one is in flight

    def open(self) -> Tensor:
        """Returns a buffer [numel] in the reduce dtype to be filled; zero in its padding."""

    def send(self, gradient: Tensor, consume: ConsumeShards) -> Pending:
        """Starts the all-to-all of its shards; ``consume`` is called with those for this rank when it is waited for."""


@dataclass(frozen=True)
class MicroBatchGradientSpec:
    layout: FlatLayout
    dtype: torch.dtype  # during reduction

    @property
    def nbytes(self) -> int:
        return self.layout.numel * self.dtype.itemsize


class MicroBatchGradientBuffers:
    """The unreduced gradients of one rank, in a ring buffer if the ranks share memory.

    Args:
        comm: the ranks that send.
        specs: in the order in which the gradients of a micro-batch are sent.
        num_last: number of them, at the end, that are opened early in backward (the root group's).

    Attributes:
        buffers: one for each of ``specs``.
    """

    def __init__(self, comm: Communicator, specs: Sequence[MicroBatchGradientSpec], num_last: int) -> None:
        self._pool = BufferPool(comm.device)
        self._ring_memory: Tensor | None = None
        self.buffers: list[MicroBatchGradient] = [_PrivateGradient(spec, comm, self._pool) for spec in specs]
        if specs and comm.may_share:  # the same on all ranks, as allocate must be called by all
            schedule = RingSchedule([spec.nbytes for spec in specs], num_last, MAX_BYTES_IN_FLIGHT)
            memory = comm.allocate(schedule.capacity, torch.uint8)
            if comm.is_shared(memory):  # else the allocation failed on some rank, and is private on all
                self._ring_memory = memory
                ring = RingBuffer(comm, memory, schedule)
                self.buffers = [_RingGradient(number, spec, ring, self._pool) for number, spec in enumerate(specs)]

    def idle(self) -> list[Tensor]:
        """Returns the memory that is not in use: between steps, all of it."""
        return self._pool.idle() if self._ring_memory is None else [self._ring_memory, *self._pool.idle()]


class _PrivateGradient:
    """A gradient that is sent from memory of this rank alone."""

    def __init__(self, spec: MicroBatchGradientSpec, comm: Communicator, pool: BufferPool) -> None:
        self._spec = spec
        self._comm = comm
        self._pool = pool
        self.nbytes = spec.nbytes * (1 if comm.world_size == 1 else 2)  # sent and received

    def open(self) -> Tensor:
        layout = self._spec.layout
        return self._pool.take(layout.extents, layout.numel, self._spec.dtype)

    def send(self, gradient: Tensor, consume: ConsumeShards) -> Pending:
        layout = self._spec.layout
        received = None
        if self._comm.world_size > 1:
            received = self._pool.take("received", layout.numel, self._spec.dtype)

        def give_back() -> None:  # after the wait: until then the backend reads and writes both
            self._pool.give(layout.extents, gradient)
            if received is not None:
                self._pool.give("received", received)

        return self._comm.all_to_all_single(gradient, consume, label=layout.name, received=received).then(give_back)


class _RingGradient:
    """A gradient in the ring; if its slot is not free when it is opened, in private memory until it is sent."""

    def __init__(self, index: int, spec: MicroBatchGradientSpec, ring: RingBuffer, pool: BufferPool) -> None:
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
        gradient = self._ring.open(self._number, self._spec.dtype)
        if gradient is None:
            self._private = self._pool.take(layout.extents, layout.numel, self._spec.dtype)
            return self._private
        for low, high in self._gaps:  # other gradients have used this slot, and the owners sum the padding too
            gradient[low:high].zero_()
        return gradient

    def send(self, gradient: Tensor, consume: ConsumeShards) -> Pending:
        pending = self._ring.send(self._number, gradient, consume, self._spec.layout.name)
        if self._private is not None:  # the ring holds a copy
            self._pool.give(self._spec.layout.extents, self._private)
            self._private = None
        return pending
