"""The exchange of micro-batch gradients through a ring of shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dtrain.distributed.communicator import GradientExchange, GradientHandle, GradientSend
from dtrain.distributed.schedule import Collective, CollectiveSchedule
from dtrain.distributed.transport.gradient_buffers import BufferPool
from dtrain.distributed.transport.ring import RingSchedule


class Announced(Protocol):
    """A buffer of this rank that the others may read, and theirs."""

    def wait(self) -> tuple[list[Tensor], list[int]]:
        """Returns the part and the weight of every rank, in rank order."""


class Announcer(Protocol):
    """The methods of ``dtrain.distributed.transport.host_memory.HostMemory`` that the exchange calls."""

    rank: int
    world_size: int
    device: torch.device
    schedule: CollectiveSchedule

    def announce(self, what: Collective, tensor: Tensor, weight: int = 0, part: Tensor | None = None) -> Announced:
        """Announces ``tensor``, which is shared, in one order on all ranks; this rank reads only ``part`` of theirs."""


class RingExchange(GradientExchange):
    """Gradients in a ring that the other ranks read: [Note: ring buffer reuse] in ``distributed.transport.ring``.

    A gradient whose slot is not free when it is opened lies in private memory until it is sent.

    Args:
        comm: the ranks that send.
        sends: in the order in which they start.
        memory: uint8 [schedule.capacity], shared.
        schedule: slots of the sends.
    """

    def __init__(self, comm: Announcer, sends: Sequence[GradientSend], memory: Tensor, schedule: RingSchedule) -> None:
        self._comm = comm
        self._sends = sends
        self._memory = memory
        self._schedule = schedule
        self._pool = BufferPool(comm.device)
        self._gaps = [_gaps(send) for send in sends]
        self._opened: dict[int, tuple[int, Tensor | None]] = {}  # number and private memory, by index
        self._num_started = 0
        self._num_finished = 0
        self._weight = 0  # its bits
        kinds = [(send.numel, send.dtype, send.filled) for send in sends]
        self._kinds = [kinds.index(kind) for kind in kinds]
        self._views: dict[tuple[int, int], tuple[Tensor, Tensor, list[Tensor]]] = {}  # of the ring, by start and kind
        self._weights: tuple[list[int], Tensor] = [], torch.empty(0)  # of all ranks, as bits and as numbers

    def begin(self, weight: Tensor) -> None:
        self._weight = int(weight.view(torch.int32))

    def open(self, index: int) -> Tensor:
        send = self._sends[index]
        # sends go around in one order, so this one starts within a cycle from the next
        number = self._num_started + (index - self._num_started) % self._schedule.cycle
        if self._schedule.slot(number).free_after >= self._num_finished:
            private = self._pool.take(send.filled, send.numel, send.dtype)
            self._opened[index] = number, private
            return private
        self._opened[index] = number, None
        gradient, _, gaps = self._slot(number, index)
        if gaps:  # other gradients have used this slot, and the owners sum the gaps too
            torch._foreach_zero_(gaps)
        return gradient

    def finish_first(self) -> int:
        return self._schedule.finish_first(self._num_started)

    def send(self, index: int) -> GradientHandle:
        send, number = self._sends[index], self._num_started
        if self.finish_first() >= self._num_finished:
            raise RuntimeError(f"send {number} starts before finish_first: {self._num_finished} sends are finished")
        opened, private = self._opened.pop(index)
        gradient, shard, _ = self._slot(opened, index)
        if private is not None:
            gradient.copy_(private)
            self._pool.give(send.filled, private)
        what = self._comm.schedule.record("all_to_all_single", send.label, gradient)
        announcement = self._comm.announce(what, gradient, self._weight, part=shard)
        # send number started - window is finished, so its window before that has been read everywhere
        self._schedule.forget(number - 2 * self._schedule.window)
        self._num_started += 1
        return _RingGradient(self, number, announcement)

    def finish(self, number: int) -> None:
        """Counts send ``number`` as finished."""
        if number != self._num_finished:
            raise RuntimeError(f"send {number} is released before send {self._num_finished}")
        self._num_finished += 1

    def idle(self) -> list[Tensor]:
        return [self._memory, *self._pool.idle()]

    def max_nbytes(self) -> int:
        return self._memory.nbytes

    def _slot(self, number: int, index: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Returns gradient ``index`` in the slot of send ``number``, its shard of this rank, and the gaps in it."""
        key = start, _ = self._schedule.slot(number).start, self._kinds[index]
        if key not in self._views:  # the slots come again, after some steps
            send = self._sends[index]
            gradient = self._memory[start : start + send.nbytes].view(send.dtype)
            shard = gradient.chunk(self._comm.world_size)[self._comm.rank] if send.numel else gradient
            self._views[key] = gradient, shard, [gradient[low:high] for low, high in self._gaps[index]]
        return self._views[key]

    def weights(self, bits: list[int]) -> Tensor:
        """Returns FP32 [world_size] from its bits; all gradients of a micro-batch have the same."""
        if self._weights[0] != bits:
            self._weights = bits, torch.tensor(bits, dtype=torch.int32).view(torch.float32)
        return self._weights[1]


class _RingGradient(GradientHandle):
    def __init__(self, exchange: RingExchange, number: int, announcement: Announced) -> None:
        self.number = number
        self._exchange = exchange
        self._announcement = announcement

    def wait(self) -> tuple[Sequence[Tensor], Tensor]:
        shards, weights = self._announcement.wait()
        return shards, self._exchange.weights(weights)

    def release(self) -> None:
        self._exchange.finish(self.number)


def _gaps(send: GradientSend) -> list[tuple[int, int]]:
    """Returns the ranges of ``send`` that are not filled."""
    stops = [0, *(stop for _, stop in send.filled)]
    starts = [*(start for start, _ in send.filled), send.numel]
    return [(start, stop) for start, stop in zip(stops, starts, strict=True) if start < stop]
