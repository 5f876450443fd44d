"""The ring buffer: shared memory from which ranks of one host send unreduced gradients, and the rule of its reuse.

[Note: ring buffer reuse] Send number n (0, 1, ... over all micro-batches and flat buffers) has one slot of the ring,
and all ranks compute the same slots. A rank that has started send j has read everything up to send j - window. So a
rank that has waited for send j knows that all ranks have read those, and a slot last used by send s is free after send
s + window. That is why a send may have to wait for an earlier one: for the one that frees its slot, and for send j -
window itself, without which other ranks could not rely on it. There is no deadlock, because a rank waits only for sends
that it has started, and all ranks start them in one order. This is the one exception to [Note: buffer reuse].
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtrain.distributed.communicator import Communicator, Pending

ConsumeShards = Callable[[Sequence[Tensor]], None]
"""Uses this rank's shard of every rank's gradient, in rank order, before it returns."""


@dataclass(frozen=True)
class RingSlot:
    """Bytes ``start`` to ``stop`` of the ring, for one send; free once send ``free_after`` is complete."""

    start: int
    stop: int
    free_after: int  # negative: at once


class RingSchedule:
    """Computes the slot of each send; pure arithmetic, equal on all ranks.

    The last gradients of a micro-batch are opened before the others are sent, so they have two slots of their own. The
    others share a ring that is long enough for ``window + 2`` of them in a row, or for all of two micro-batches.

    Args:
        sizes: bytes of the sends of one micro-batch, in their order.
        num_last: number of them, at the end, that are opened early.
        limit: bytes that may be in flight.
    """

    def __init__(self, sizes: Sequence[int], num_last: int, limit: int) -> None:
        self._sizes = sizes
        self.cycle = len(sizes)
        # as many sends as fit into the limit, but at least two, so that they overlap, and at most one micro-batch
        self.window = next((w for w in range(self.cycle, 2, -1) if _longest_run(sizes, w) <= limit), min(2, self.cycle))
        self._num_ring = self.cycle - num_last
        ring, last = sizes[: self._num_ring], sizes[self._num_ring :]
        self._split = 0
        if ring:  # the largest on top, because a send that does not fit at the end leaves a gap there
            self._split = min(2 * sum(ring), _longest_run(ring, self.window + 2) + max(ring))
        self.capacity = self._split + 2 * sum(last)
        self._cursors = [0, self._split]  # of the ring, and of the last gradients
        self._slots: dict[int, RingSlot] = {}
        self._next = 0

    def slot(self, number: int) -> RingSlot:
        """Returns the slot of send ``number``, which must not be forgotten yet."""
        while self._next <= number:
            self._slots[self._next] = self._append()
            self._next += 1
        return self._slots[number]

    def _append(self) -> RingSlot:
        index = self._next % self.cycle
        region = int(index >= self._num_ring)
        low, high = ((0, self._split), (self._split, self.capacity))[region]
        start = self._cursors[region]
        if start + self._sizes[index] > high:
            start = low
        stop = self._cursors[region] = start + self._sizes[index]
        # forgotten slots are free: all ranks have read them
        overlapping = [n for n, other in self._slots.items() if other.start < stop and start < other.stop]
        return RingSlot(start, stop, max(overlapping) + self.window if overlapping else -1)

    def forget(self, number: int) -> None:
        """Drops the slots of sends up to ``number``, which all ranks must have read."""
        for old in [n for n in self._slots if n <= number]:
            del self._slots[old]


def _longest_run(sizes: Sequence[int], count: int) -> int:
    """Returns the largest sum of ``count`` consecutive ``sizes``, which repeat."""
    return max(sum(sizes[(first + i) % len(sizes)] for i in range(count)) for first in range(len(sizes)))


class RingBuffer:
    """The ring's memory and the sends in flight from it; see [Note: ring buffer reuse].

    Args:
        comm: the ranks that send.
        memory: uint8 [schedule.capacity], shared.
        schedule: slots of the sends.
    """

    def __init__(self, comm: Communicator, memory: Tensor, schedule: RingSchedule) -> None:
        self._comm = comm
        self._memory = memory
        self._schedule = schedule
        self._num_started = 0
        self._in_flight: deque[tuple[int, Pending]] = deque()

    def next_number(self, index: int) -> int:
        """Returns the number of the next send of the flat buffer at ``index`` in the cycle."""
        # sends go around in one order, so this one starts within a cycle from the next
        return self._num_started + (index - self._num_started) % self._schedule.cycle

    def open(self, number: int, dtype: torch.dtype) -> Tensor | None:
        """Returns the slot of send ``number`` to be written, or None if it cannot be freed by waiting yet.

        Ranks whose graphs differ open slots at different times, so this must not communicate: it waits only for
        sends whose ready message has been sent.
        """
        slot = self._schedule.slot(number)
        if slot.free_after >= self._num_started:  # this rank has not started that send, so nothing could be waited for
            return None
        if any(started <= slot.free_after and not pending.is_sent for started, pending in self._in_flight):
            return None
        self._wait_for(slot.free_after)
        return self._view(slot, dtype)

    def send(self, number: int, gradient: Tensor, consume: ConsumeShards, label: str) -> Pending:
        """Starts the all-to-all of ``gradient``, which lies in its slot or is copied there."""
        slot, window = self._schedule.slot(number), self._schedule.window
        self._wait_for(max(slot.free_after, self._num_started - window))
        view = self._view(slot, gradient.dtype)
        if view.data_ptr() != gradient.data_ptr():
            view.copy_(gradient)
        pending = self._comm.all_to_all_single(view, consume, label=label)
        self._in_flight.append((self._num_started, pending))
        # send number started - window is complete, so its window before that has been read everywhere
        self._schedule.forget(self._num_started - 2 * window)
        self._num_started += 1
        return pending

    def _wait_for(self, number: int) -> None:
        while self._in_flight and self._in_flight[0][0] <= number:
            self._in_flight.popleft()[1].wait()

    def _view(self, slot: RingSlot, dtype: torch.dtype) -> Tensor:
        return self._memory[slot.start : slot.stop].view(dtype)
