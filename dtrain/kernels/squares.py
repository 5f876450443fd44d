"""Sums of squares of any number of FP32 or BF16 tensors, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtrain.kernels.tiles import TileTable

_CHUNKS = 8  # of one tile
_NUM_WARPS = 8
_PROGRAMS = 1024  # enough for every multiprocessor, and few enough to be added at once
_FIELDS = 4  # address, chunks, number of the first chunk, whether the elements are BF16


@triton.jit(do_not_specialize=["first", "count"])
def _squares(
    rows,
    tiles,
    first,
    count,
    sums,
    FIELDS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BY_CHUNK: tl.constexpr,
):
    chunk = tl.arange(0, CHUNKS)
    index = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    total = tl.zeros((CHUNKS,), tl.float64)
    number = tl.program_id(0)
    while number < count:
        tile = tiles + (first + number) * 2
        row = rows + tl.load(tile) * FIELDS
        start = tl.load(tile + 1) * CHUNKS
        mask = start + chunk < tl.load(row + 1)
        place = start.to(tl.int64) * CHUNK + index
        if tl.load(row + 3) != 0:
            halves = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.bfloat16)), 16)
            x = tl.load(halves + place, mask=mask[:, None], other=0.0).to(tl.float32)
        else:
            values = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float32)), 16)
            x = tl.load(values + place, mask=mask[:, None], other=0.0)
        # times 2^(126 - exponent) the largest element is between 0.5 and 4, and a power of two rounds nothing; from 1
        # to 252, so that the power is a normal number also for zeros, subnormals and Inf
        exponent = tl.max((x.to(tl.int32, bitcast=True) >> 23) & 0xFF, axis=1)
        exponent = tl.minimum(tl.maximum(exponent, 1), 252)
        scaled = x * ((253 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
        unscale = ((2 * exponent.to(tl.int64) + 771) << 52).to(tl.float64, bitcast=True)  # 2^(2 * exponent - 252)
        squares = tl.sum(scaled * scaled, axis=1).to(tl.float64) * unscale
        if BY_CHUNK:
            tl.store(sums + tl.load(row + 2) + start + chunk, squares, mask=mask)
        else:
            total += squares
        number += tl.num_programs(0)
    if not BY_CHUNK:
        tl.store(sums + tl.program_id(0), tl.sum(total))


class SquareSums:
    """Sums of squares of ``tensors``.

    A sum is not finite only if an element is not ([Note: squares beyond FP32] in ``dtrain.parameters.squares``):
    each chunk is scaled while it is in registers, so one pass does.

    Args:
        tensors: FP32 or BF16, contiguous, each a whole number of chunks.
        chunk: elements of a chunk, a power of two.
        by_chunk: one sum for each chunk, instead of a few for all.
    """

    def __init__(self, tensors: Sequence[Tensor], chunk: int, *, by_chunk: bool) -> None:
        self._tensors = list(tensors)  # keeps what the table points to
        self._chunk = chunk
        self._by_chunk = by_chunk
        counts = [tensor.numel() // chunk for tensor in tensors]
        starts = [sum(counts[:number]) for number in range(len(counts))]
        places = zip(tensors, counts, starts, strict=True)
        rows = [[t.data_ptr(), n, start, int(t.dtype == torch.bfloat16)] for t, n, start in places]
        self._device = tensors[0].device
        self._table = TileTable(rows, [-(-count // _CHUNKS) for count in counts], self._device)
        self._programs = min(self._table.num_tiles(), _PROGRAMS)
        self._size = sum(counts) if by_chunk else self._programs

    def compute(self) -> Tensor:
        """Returns FP64 [chunks], or FP64 [n] whose sum is the sum of all squares."""
        sums = torch.empty(self._size, dtype=torch.float64, device=self._device)
        self._table.launch(
            _squares,
            sums,
            programs=self._programs,
            FIELDS=_FIELDS,
            CHUNKS=_CHUNKS,
            CHUNK=self._chunk,
            BY_CHUNK=self._by_chunk,
            num_warps=_NUM_WARPS,
        )
        return sums
