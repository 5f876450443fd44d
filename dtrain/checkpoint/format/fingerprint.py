"""A 64-bit fingerprint of a tensor that does not depend on how the tensor is cut into pieces, nor on their order.

    F(x) = sum over i of  bits(x[i]) * weight(i)   mod 2^64,      weight(i) = splitmix64_finaliser(i) | 1

``bits`` is the element's bit pattern as an unsigned integer of its width and i its row-major index. Sums over disjoint
intervals add up, so every rank takes its own part. A flip of bit b of element i changes the sum by 2^b * weight(i),
which is never 0 mod 2^64 because the weight is odd: every single-bit flip is caught. Two different tensors collide by
chance once in about 2^64; it is no defence against somebody who wants a collision.

Source of the finaliser: Steele, Lea, Flood, 'Fast splittable pseudorandom number generators', OOPSLA 2014, figure 16
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
_BLOCK = 1 << 15  # elements weighed at a time: weights and products stay in the processor's second-level cache
_COPY_BYTES = 4 << 20  # of a tensor on a device, copied to the host at a time
_SHARING = 8  # tensors that share their weights at most: as many blocks are on the host at once
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

_Words = npt.NDArray[np.uint64]


@cache
def _multiples() -> _Words:
    return np.arange(_BLOCK, dtype=np.uint64) * np.uint64(_FIRST)


def _fill_weights(z: _Words, scratch: _Words, start: int) -> None:
    """Makes ``z`` the weights of the indices from ``start`` on."""
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


def _weigh(blocks: Sequence[memoryview], itemsize: int, start: int) -> list[int]:
    """For each of ``blocks``, equally long, the part of the sum of its elements, the first of which is ``start``."""
    patterns = [np.frombuffer(block, dtype=_UNSIGNED[itemsize]) for block in blocks]
    totals, numel = [0] * len(patterns), len(patterns[0])
    weights, products = np.empty((2, min(_BLOCK, numel)), np.uint64)
    for offset in range(0, numel, _BLOCK):
        count = min(_BLOCK, numel - offset)
        _fill_weights(weights[:count], products[:count], start + offset)
        for number, pattern in enumerate(patterns):
            np.multiply(weights[:count], pattern[offset : offset + count], out=products[:count])
            totals[number] += int(products[:count].sum())
    return [total & MASK for total in totals]


def fingerprint_bytes(data: memoryview, itemsize: int, start: int) -> int:
    """The part of the sum for consecutive elements of ``itemsize`` bytes, the first of which has index ``start``."""
    return _weigh([data], itemsize, start)[0]


def byte_view(data: Tensor) -> memoryview:
    """The bytes of a contiguous 1-D CPU tensor, shared with it."""
    unit_stride = data.as_strided(data.shape, (1,))  # a single element counts as contiguous whatever its stride
    return unit_stride.view(torch.uint8).numpy().data


def host_blocks(data: Tensor) -> Iterator[memoryview]:
    """The bytes of a contiguous 1-D tensor on any device, some MiB at a time and never within an element."""
    step = max(1, _COPY_BYTES // data.element_size())
    for start in range(0, data.numel(), step):
        yield byte_view(data[start : start + step].detach().cpu())


def fingerprint(data: Tensor, start: int = 0) -> int:
    """The part of the sum for ``data`` [n], contiguous, on any device, whose first element has index ``start``.

    Parts of one tensor add up mod 2^64 to the fingerprint of the whole.
    """
    return next(fingerprints([(data, start)]))


def fingerprints(parts: Iterable[tuple[Tensor, int]]) -> Iterator[int]:
    """As :func:`fingerprint` of each (data, start), in their order.

    The weights cost more than the sum. Neighbours with equal start, length and width share them, so give a master and
    its moments one after the other.
    """

    def interval(part: tuple[Tensor, int]) -> tuple[int, int, int]:
        data, start = part
        return start, data.numel(), data.element_size()

    for (start, _, itemsize), neighbours in groupby(parts, interval):
        while sharing := [data for data, _ in islice(neighbours, _SHARING)]:
            totals, index = [0] * len(sharing), start
            for blocks in zip(*map(host_blocks, sharing), strict=True):
                for number, part in enumerate(_weigh(blocks, itemsize, index)):
                    totals[number] += part
                index += len(blocks[0]) // itemsize
            yield from (total & MASK for total in totals)
