"""Buffers of micro-batch gradients in memory of this rank alone, and how many of them may be in flight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import overload

import torch
from torch import Tensor

from dtrain.distributed.communicator import GradientExchange, GradientSend

MAX_BYTES_IN_FLIGHT = 64 * 2**20
"""Bytes of unreduced gradients that may be in flight before a rank waits for the oldest.

Small ones gain from overlap, large ones must not pile up.
"""


class BufferPool:
    """Flat buffers that the next gradient of the same layout reuses: in each step the same ones for the same ones."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[object, list[Tensor]] = {}
        self._free: dict[object, set[int]] = {}  # their numbers

    def take(self, key: object, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns a buffer that was given back under ``key``, or a new one of zeros.

        A key that stands for the filled elements keeps the others zero, because its users write the same elements.
        """
        place = key, numel, dtype
        free, buffers = self._free.setdefault(place, set()), self._buffers.setdefault(place, [])
        if free:
            number = min(free)  # not the last given, which would take turns from step to step
            free.remove(number)
            return buffers[number]
        buffers.append(torch.zeros(numel, dtype=dtype, device=self._device))
        return buffers[-1]

    def give(self, key: object, buffer: Tensor) -> None:
        place = key, buffer.numel(), buffer.dtype
        self._free[place].add(next(n for n, own in enumerate(self._buffers[place]) if own is buffer))

    def idle(self) -> list[Tensor]:
        return [self._buffers[place][number] for place, free in self._free.items() for number in free]


class Rows(Sequence[Tensor]):
    """The rows of a matrix, cut when they are read: a GPU adds all of them in one launch.

    Args:
        matrix: [world_size, n], each row contiguous.
    """

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix

    @cached_property
    def _cut(self) -> Sequence[Tensor]:
        return self._matrix.unbind()

    def __len__(self) -> int:
        return self._matrix.shape[0]

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> Tensor | Rows:
        return Rows(self._matrix[index]) if isinstance(index, slice) else self._matrix[index]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._cut)


class PrivateExchange(GradientExchange):
    """Base of the exchanges that send from memory of this rank alone.

    Args:
        sends: in the order in which they start.
        device: where the gradients live.
        num_buffers: buffers that a send holds, its own and those for what arrives.
        num_extra: elements of a buffer beyond those of its gradient; of all, so that gradients of one size share them.
    """

    def __init__(
        self, sends: Sequence[GradientSend], device: torch.device, num_buffers: int, num_extra: int = 0
    ) -> None:
        self.sends = sends
        self._num_extra = num_extra
        self.pool = BufferPool(device)
        self.num_started = 0
        self._opened: dict[int, Tensor] = {}
        self._sizes = [num_buffers * send.nbytes for send in sends]
        self._num_kept = [num_kept_in_flight(self._sizes, index) for index in range(len(sends))]

    def open(self, index: int) -> Tensor:
        send = self.sends[index]
        self._opened[index] = self.pool.take(self._key(index), send.numel + self._num_extra, send.dtype)
        return self._opened[index]

    def give_back(self, index: int, gradient: Tensor) -> None:
        """Takes back the buffer of send ``index``."""
        self.pool.give(self._key(index), gradient)

    def _key(self, index: int) -> object:
        return self.sends[index].filled, self.gap(index)

    def take_opened(self, index: int) -> tuple[GradientSend, Tensor, int]:
        """Returns send ``index``, its buffer and its number, and counts it as started."""
        number, self.num_started = self.num_started, self.num_started + 1
        return self.sends[index], self._opened.pop(index), number

    def finish_first(self) -> int:
        # by the sizes alone, which are equal on all ranks, so that all wait for the same sends
        return self.num_started - 1 - self._num_kept[self.num_started % len(self.sends)]

    def idle(self) -> list[Tensor]:
        return self.pool.idle()

    def max_nbytes(self) -> int:
        # those that may be in flight when one starts, it, and the next one, which backward fills meanwhile
        sizes = self._sizes
        spans = [[(i - n) % len(sizes) for n in range(-1, kept + 1)] for i, kept in enumerate(self._num_kept)]
        return max((sum(sizes[index] for index in set(span)) for span in spans), default=0)


def num_kept_in_flight(sizes: Sequence[int], index: int) -> int:
    """Returns how many sends may be in flight when send ``index`` of a cycle of ``sizes`` starts.

    At least one, so that two overlap; else as many as the limit holds, and at most a cycle.
    """
    count = total = 0
    while count < len(sizes):
        total += sizes[(index - 1 - count) % len(sizes)]
        if count >= 1 and total > MAX_BYTES_IN_FLIGHT:
            break
        count += 1
    return count
