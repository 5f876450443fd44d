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

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MASK = (1 << 64) - 1
_BLOCK = 1 << 14  # elements weighed at a time: the weights stay in the processor's cache, twice as fast as 2^20
_COPY_BYTES = 4 << 20  # of a tensor on a device, copied to the host at a time
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def _weights(start: int, count: int) -> npt.NDArray[np.uint64]:
    z = np.arange(start, start + count, dtype=np.uint64)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    z |= np.uint64(1)
    return z


def fingerprint_bytes(data: memoryview, itemsize: int, start: int) -> int:
    """The part of the sum for consecutive elements of ``itemsize`` bytes, the first of which has index ``start``."""
    patterns = np.frombuffer(data, dtype=_UNSIGNED[itemsize])
    total = 0
    for offset in range(0, len(patterns), _BLOCK):
        block = patterns[offset : offset + _BLOCK]
        weighted = _weights(start + offset, len(block))
        weighted *= block
        total += int(weighted.sum(dtype=np.uint64))
    return total & MASK


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
    itemsize, total, index = data.element_size(), 0, start
    for block in host_blocks(data):
        total += fingerprint_bytes(block, itemsize, index)
        index += len(block) // itemsize
    return total & MASK
