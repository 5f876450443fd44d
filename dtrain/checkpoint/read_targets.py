"""Targets of a load: saved intervals are read straight into memory, or through a small staging buffer."""

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
    """A tensor to fill with consecutive row-major elements of a saved tensor.

    Attributes:
        kind: of the saved tensor, such as ``master``.
        name: of the saved tensor.
        start: first row-major element to read; ``data.numel()`` elements are read.
        data: any shape, strides and device; values are cast to its dtype.
    """

    kind: str
    name: str
    start: int
    data: Tensor


@dataclass(frozen=True)
class PartialRead:
    """The part of a read target that lies in one chunk of the manifest.

    Attributes:
        dtype: saved dtype.
        offset: its first byte, counted from the start of the chunk.
        data: the tensor to fill: contiguous, or small enough for the staging buffer.
    """

    dtype: torch.dtype
    chunk: FileInterval
    offset: int
    data: Tensor


def partial_reads(entry: TensorEntry, start: int, data: Tensor) -> Iterator[PartialRead]:
    """Yields the reads that fill ``data`` with the elements of ``entry`` from ``start`` on."""
    stop, itemsize = start + data.numel(), entry.dtype.itemsize
    chunks = _overlapping(entry, start, stop)
    if data.is_contiguous():
        flat = data.view(-1)
        for chunk in chunks:
            low, high = max(start, chunk.start), min(stop, chunk.stop)
            part = flat[low - start : high - start]
            yield PartialRead(entry.dtype, chunk, (low - chunk.start) * itemsize, part)
    elif len(chunks) == 1 and data.numel() * itemsize <= STAGING_BYTES:
        yield PartialRead(entry.dtype, chunks[0], (start - chunks[0].start) * itemsize, data)
    else:  # split until a part is contiguous or fits the staging buffer: no second copy of a large tensor
        for part in data.unbind():
            yield from partial_reads(entry, start, part)
            start += part.numel()


def _overlapping(entry: TensorEntry, start: int, stop: int) -> tuple[FileInterval, ...]:
    first = bisect_right(entry.chunks, start, key=lambda chunk: chunk.stop)
    end = bisect_right(entry.chunks, stop - 1, key=lambda chunk: chunk.start)
    return entry.chunks[first:end] if start < stop else ()


def fill(part: PartialRead, read: Callable[[int, memoryview], None]) -> None:
    """Fills ``part.data``; ``read(offset, target)`` reads the chunk's bytes from ``offset`` on."""
    data, itemsize = part.data, part.dtype.itemsize
    if data.device.type == "cpu" and data.dtype == part.dtype and data.is_contiguous():
        read(part.offset, byte_view(data))
        return
    step = STAGING_BYTES // itemsize
    staging = torch.empty(min(step, data.numel()) * itemsize, dtype=torch.uint8, pin_memory=data.device.type == "cuda")
    offset = part.offset
    for values in data.split(step) if data.is_contiguous() else (data,):
        block = staging[: values.numel() * itemsize]
        read(offset, byte_view(block))
        values.copy_(block.view(part.dtype).view(values.shape))
        offset += len(block)
