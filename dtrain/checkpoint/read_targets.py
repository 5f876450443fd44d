"""Where saved intervals of tensors go: straight into memory, or through a little staging memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dtrain.checkpoint.format.fingerprint import byte_view
from dtrain.checkpoint.format.manifest import FileInterval, TensorEntry

STAGING_BYTES = 4 << 20


@dataclass(frozen=True)
class ReadTarget:
    """A tensor to fill with as many row-major elements of a saved one.

    Attributes:
        kind: of the saved tensor.
        name: of the saved tensor.
        start: the first element.
        data: of any shape, strides and device; values are cast to its dtype.
    """

    kind: str
    name: str
    start: int
    data: Tensor


@dataclass(frozen=True)
class PartialRead:
    """A part of a place that lies in one chunk.

    Attributes:
        dtype: as saved.
        chunk: where it lies.
        offset: bytes from the beginning of the chunk to its own.
        data: what it fills: contiguous, or small enough for the staging memory.
    """

    dtype: torch.dtype
    chunk: FileInterval
    offset: int
    data: Tensor


def partial_reads(entry: TensorEntry, start: int, data: Tensor) -> Iterator[PartialRead]:
    """What fills ``data`` with the elements of ``entry`` from ``start`` on."""
    stop, itemsize = start + data.numel(), entry.dtype.itemsize
    held = _overlapping(entry, start, stop)
    if data.is_contiguous():
        flat = data.view(-1)
        for chunk in held:
            low, high = max(start, chunk.start), min(stop, chunk.stop)
            part = flat[low - start : high - start]
            yield PartialRead(entry.dtype, chunk, (low - chunk.start) * itemsize, part)
    elif len(held) == 1 and data.numel() * itemsize <= STAGING_BYTES:
        yield PartialRead(entry.dtype, held[0], (start - held[0].start) * itemsize, data)
    else:
        for part in data.unbind():
            yield from partial_reads(entry, start, part)
            start += part.numel()


def _overlapping(entry: TensorEntry, start: int, stop: int) -> tuple[FileInterval, ...]:
    first = bisect_right(entry.chunks, start, key=lambda chunk: chunk.stop)
    end = bisect_right(entry.chunks, stop - 1, key=lambda chunk: chunk.start)
    return entry.chunks[first:end] if start < stop else ()


def fill(segment: PartialRead, read: Callable[[int, memoryview], None]) -> None:
    """Fills the segment's tensor; ``read(offset, target)`` gives the chunk's bytes from ``offset`` on."""
    data, itemsize = segment.data, segment.dtype.itemsize
    if data.device.type == "cpu" and data.dtype == segment.dtype and data.is_contiguous():
        read(segment.offset, byte_view(data))
        return
    step = STAGING_BYTES // itemsize
    staging = torch.empty(min(step, data.numel()) * itemsize, dtype=torch.uint8, pin_memory=data.device.type == "cuda")
    offset = segment.offset
    for part in data.split(step) if data.is_contiguous() else (data,):
        block = staging[: part.numel() * itemsize]
        read(offset, byte_view(block))
        part.copy_(block.view(segment.dtype).view(part.shape))
        offset += len(block)
