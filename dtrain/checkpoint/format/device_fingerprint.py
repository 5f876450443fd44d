"""The fingerprints of ``dtrain.checkpoint.format.fingerprint`` as a tensor; on a GPU without waiting for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from dtrain.checkpoint.format.fingerprint import fingerprints
from dtrain.precision.remainder import Numbers, read

_BLOCK = 1 << 22  # elements summed at a time on a device: a temporary takes 32 MiB
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Part = tuple[Numbers, int]
"""Contiguous data [n] and the index of its first element; a pair is read a block at a time."""


def bits_of(data: Tensor) -> Tensor:
    """Returns ``data`` as integers of its width, without a copy."""
    return data.view(_BITS[data.element_size()])


def flat(tensor: Tensor) -> Tensor:
    """Returns the elements in row-major order, contiguous; those of a complex tensor as pairs of real numbers."""
    values = tensor.detach()
    return (torch.view_as_real(values) if values.is_complex() else values).contiguous().view(-1)


def signed(number: int) -> int:
    """Returns the int64 that has the bits of ``number``, which is below 2^64."""
    return number - (1 << 64) if number >> 63 else number


def fingerprint_tensor(parts: Sequence[Part], device: torch.device) -> Tensor:
    """Returns int64 [number of parts] on ``device``: the bits of the fingerprint of each part, none of them empty.

    Consecutive parts with equal start and length share their weights.
    """
    found: dict[int, Tensor] = {}
    on_host = [number for number, (data, _) in enumerate(parts) if data.device.type == "cpu"]
    if on_host:
        sums = [
            signed(total) for total in fingerprints((read(parts[number][0]), parts[number][1]) for number in on_host)
        ]
        found |= zip(on_host, torch.tensor(sums, dtype=torch.int64).to(device), strict=True)
    for itemsize in sorted({data.dtype.itemsize for data, _ in parts}):
        rest = [n for n, (data, _) in enumerate(parts) if data.device.type != "cpu" and data.dtype.itemsize == itemsize]
        found |= zip(rest, device_sums([parts[number] for number in rest]), strict=True)
    if not parts:
        return torch.zeros(0, dtype=torch.int64, device=device)
    return torch.stack([found[number].to(device) for number in range(len(parts))])


@dataclass(frozen=True)
class _DataInterval:
    """At most a block of elements of part ``number``, whose first element has index ``start``."""

    number: int
    data: Numbers
    start: int


def device_sums(parts: Sequence[Part]) -> list[Tensor]:
    """Returns the fingerprints, 0-dim int64, of parts of one element size on one device; queues a few kernels a block.

    int64 wraps around, so its sums are those mod 2^64.
    """
    totals: dict[int, Tensor] = {}
    for block in _blocks(parts):
        shared = [list(same) for _, same in groupby(block, lambda interval: (interval.start, interval.data.numel()))]
        sizes = [(same[0].start, same[0].data.numel()) for same in shared]
        weights = _weights(sizes, block[0].data.device).split([numel for _, numel in sizes])
        patterns = torch.cat([bits_of(read(interval.data)) for interval in block]).to(torch.int64)
        width = 8 * block[0].data.dtype.itemsize
        if width < 64:
            patterns &= (1 << width) - 1  # the sign was extended
        patterns *= torch.cat([own for own, same in zip(weights, shared, strict=True) for _ in same])
        sums, before = patterns.cumsum(0), patterns.new_zeros(())
        for interval, end in zip(block, accumulate(interval.data.numel() for interval in block), strict=True):
            total, before = sums[end - 1] - before, sums[end - 1]
            number = interval.number
            totals[number] = totals[number] + total if number in totals else total
    return [totals[number] for number in range(len(parts))]


def _blocks(parts: Sequence[Part]) -> Iterator[list[_DataInterval]]:
    """Yields the parts, cut into intervals, in lists with at most a block of elements."""
    block: list[_DataInterval] = []
    room = _BLOCK
    for number, (data, start) in enumerate(parts):
        for offset in range(0, data.numel(), _BLOCK):
            values = data[offset : offset + _BLOCK]
            if values.numel() > room:
                yield block
                block, room = [], _BLOCK
            block.append(_DataInterval(number, values, start + offset))
            room -= values.numel()
    if block:
        yield block


def _weights(intervals: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Returns the weights of intervals (start, length), one after the other."""
    z = torch.cat([torch.arange(start, start + numel, dtype=torch.int64, device=device) for start, numel in intervals])
    for shift, factor in _ROUNDS:
        z ^= (z >> shift) & ((1 << 64 - shift) - 1)  # the sign is shifted in
        z *= signed(factor)
    z ^= (z >> 31) & ((1 << 33) - 1)
    return z.bitwise_or_(1)
