"""Slots of the ring from which ranks of one host send unreduced gradients, and the rule of their reuse.

[Note: ring buffer reuse] Send number n (0, 1, ... over all micro-batches and flat buffers) has one slot of the ring,
and all ranks compute the same slots. A rank *finishes* a send when it has waited for it and used what it received. It
starts send j only after it has finished send j - window. So a rank that has waited for send j knows that all ranks have
read everything up to send j - window, and a slot last used by send s is free once send s + window is finished. Hence
the two conditions of a start: the send that frees its slot, and send j - window itself, without which other ranks could
not rely on it, must be finished. Transport and caller share the rule: ``finish_first`` names the send, the caller waits
for it and releases it, and ``send`` refuses to start otherwise. There is no deadlock, because a rank waits only for
sends that it has started, and all ranks start them in one order. This is an exception to [Note: buffer reuse], as is
[Note: two send buffers] in ``engine.adapters.fsdp2.communication``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RingSlot:
    """Bytes ``start`` to ``stop`` of the ring, for one send; free once send ``free_after`` is finished."""

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
        window = next((w for w in range(self.cycle, 2, -1) if _longest_run(sizes, w) <= limit), min(2, self.cycle))
        self._num_ring = self.cycle - num_last
        ring, last = sizes[: self._num_ring], sizes[self._num_ring :]
        self._split = 0
        if ring:  # the largest on top, because a send that does not fit at the end leaves a gap there
            self._split = min(2 * sum(ring), _longest_run(ring, window + 2) + max(ring))
        if self._split < 2 * sum(ring):
            # a slot is free again `window` sends after its last use, so a ring of window + 2 slots would allow only one
            # send in flight when the next gradient is opened; half the window allows half of it
            window = window // 2 + 1
        self.window = window
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

    def finish_first(self, number: int) -> int:
        """Returns the send that must be finished before send ``number`` starts; negative: none.

        It frees the slot of the send after that, too, so the next gradient can be opened without waiting.
        """
        next_free = min(self.slot(number + 1).free_after, number - 1)
        return max(self.slot(number).free_after, number - self.window, next_free)

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
        while self._slots and (oldest := next(iter(self._slots))) <= number:
            del self._slots[oldest]


def _longest_run(sizes: Sequence[int], count: int) -> int:
    """Returns the largest sum of ``count`` consecutive ``sizes``, which repeat."""
    return max(sum(sizes[(first + i) % len(sizes)] for i in range(count)) for first in range(len(sizes)))
