"""A 64-bit tensor fingerprint that is independent of how the tensor is sharded.

    F(x) = sum over i of  bits(x[i]) * weight(i)   mod 2^64,      weight(i) = splitmix64_finalizer(i) | 1

``bits`` is the element's bit pattern as an unsigned integer of its width and i its row-major index. Sums over disjoint
intervals add up, so every rank computes the sum over its own elements. A flip of bit b of element i changes the sum by
2^b * weight(i), which is never 0 mod 2^64 because the weight is odd: every single-bit flip is detected. Two different
tensors collide by chance with a probability of about 2^-64; the fingerprint does not protect against an attacker.

Source of the finalizer: Steele, Lea, Flood, 'Fast splittable pseudorandom number generators', OOPSLA 2014, figure 16
(David Stafford's variant 13).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby, islice

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MASK = (1 << 64) - 1
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, np.uint64(0x94D049BB133111EB)
_BLOCK = 1 << 15  # elements summed at a time: weights stay in the L2 cache
_COPY_BYTES = 4 << 20  # bytes of a device tensor copied to the host at a time
_MAX_SHARING = 8  # tensors that share their weights; the same number of blocks is on the host at once
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

_UInt64s = npt.NDArray[np.uint64]


@cache
def _multiples() -> _UInt64s:
    return np.arange(_BLOCK, dtype=np.uint64) * np.uint64(_FIRST)


def _fill_weights(z: _UInt64s, scratch: _UInt64s, start: int) -> None:
    if start + len(z) <= 1 << 30:  # z >> 30 is 0, so the first products are an arithmetic progression
        np.add(_multiples()[: len(z)], np.uint64(start * _FIRST & MASK), out=z)
    else:
        z[:] = np.arange(start, start + len(z), dtype=np.uint64)
        z ^= np.right_shift(z, np.uint64(30), out=scratch)
        z *= np.uint64(_FIRST)
    z ^= np.right_shift(z, np.uint64(27), out=scratch)
    z *= _SECOND
    z ^= np.right_shift(z, np.uint64(31), out=scratch)
    z |= np.uint64(1)


def _partial_sums(blocks: Sequence[memoryview], itemsize: int, start: int) -> list[int]:
    """Returns the sums over blocks of equal length whose first element has index ``start``."""
    patterns = [np.frombuffer(block, dtype=_UNSIGNED[itemsize]) for block in blocks]
    totals, numel = [0] * len(patterns), len(patterns[0])
    weights, scratch = np.empty((2, min(_BLOCK, numel)), np.uint64)
    for offset in range(0, numel, _BLOCK):
        count = min(_BLOCK, numel - offset)
        _fill_weights(weights[:count], scratch[:count], start + offset)
        for number, pattern in enumerate(patterns):
            bits = pattern[offset : offset + count]
            totals[number] += int(np.einsum("i,i->", weights[:count], bits, dtype=np.uint64, casting="safe"))
    return [total & MASK for total in totals]


def fingerprint_bytes(data: memoryview, itemsize: int, start: int) -> int:
    """Returns the sum over consecutive elements of ``itemsize`` bytes whose first has index ``start``."""
    return _partial_sums([data], itemsize, start)[0]


def byte_view(data: Tensor) -> memoryview:
    """Returns the bytes of a contiguous 1-D CPU tensor without a copy."""
    unit_stride = data.as_strided(data.shape, (1,))  # a single element counts as contiguous with any stride
    return unit_stride.view(torch.uint8).numpy().data


def host_blocks(data: Tensor) -> Iterator[memoryview]:
    """Yields the bytes of a contiguous 1-D tensor on any device in blocks of a few MiB of whole elements."""
    step = max(1, _COPY_BYTES // data.element_size())
    for start in range(0, data.numel(), step):
        yield byte_view(data[start : start + step].detach().cpu())


def fingerprint(data: Tensor, start: int = 0) -> int:
    """Returns the sum over ``data`` [n], contiguous, on any device, whose first element has index ``start``.

    The sums over the intervals of a tensor add up mod 2^64 to its fingerprint.
    """
    return next(fingerprints([(data, start)]))


def fingerprints(parts: Iterable[tuple[Tensor, int]]) -> Iterator[int]:
    """Yields ``fingerprint`` of each (data, start), in order.

    The weights cost more than the sum. Consecutive items with equal start, length and element size share them, so pass
    a master and its moments one after the other.
    """

    def interval(part: tuple[Tensor, int]) -> tuple[int, int, int]:
        data, start = part
        return start, data.numel(), data.element_size()

    for (start, _, itemsize), group in groupby(parts, interval):
        while sharing := [data for data, _ in islice(group, _MAX_SHARING)]:
            totals, index = [0] * len(sharing), start
            for blocks in zip(*map(host_blocks, sharing), strict=True):
                for number, part in enumerate(_partial_sums(blocks, itemsize, index)):
                    totals[number] += part
                index += len(blocks[0]) // itemsize
            yield from (total & MASK for total in totals)
