"""Sums of squares of FP32 or BF16 tensors, in tensor code, for elements of any magnitude.

[Note: squares beyond FP32] FP32 squares underflow below 1e-19 and overflow above 1.8e19, while gradients times loss
scale and weight may have any FP32 magnitude. On a CPU the norm of a chunk is still taken in FP32, which is nine times
as fast as FP64. If the result shows that squares may have left the range, the norm is taken again, of the chunk times a
power of two, which rounds nothing. What is taken depends on the chunk alone, so the bits are the same at any sharding.
Where bits may depend on the sharding, chunks are not taken again if what they may have lost does not show in the sum:
most chunks that look too small are zero, such as those of words that are not in the batch.
A GPU takes FP64 from the start, because the host would have to wait to learn which chunks those are. The sum over
chunks is FP64, whose range holds it. So a sum is not finite only if an element is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_LOW, _HIGH = 2.0**-40, 2.0**60
"""Norms of a chunk between which its FP32 squares lose nothing that counts: squares below 2^-126 are 2^-46 of it."""

_STRETCH = 2.0**100  # takes any norm outside of them, up to 2^140 and down to 2^-149, to where its squares fit

_LOST = 2.0**-86
"""Largest loss by underflow in a square, 2^-126, times 2^40: a mean square above it is exact to 2^-40."""

_BLOCK = 1 << 17  # elements that are stretched at a time on a CPU: they stay in a core's cache
_GPU_BLOCK = 1 << 25  # elements that are widened at a time on a GPU
_ROW = 1 << 16  # elements of a chunk of sum_squares


def chunk_squares(chunks: Sequence[Tensor], norms: Sequence[Tensor] | None = None, *, each: bool = True) -> Tensor:
    """Returns FP64 [number of chunks], the sums of squares of the rows of ``chunks``.

    Args:
        chunks: FP32 or BF16 [n, elements of a chunk] each; at least one.
        norms: FP32 [n] for each, what ``chunk_norms`` gave for the rows on a CPU, if it is known.
        each: whether each of them counts, not only their sum.
    """
    if chunks[0].device.type != "cpu":
        blocks = [block for rows in chunks for block in rows.split(max(_GPU_BLOCK // rows.shape[1], 1))]
        return torch.cat([torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64) for rows in blocks]).square_()
    cheap = torch.cat([chunk_norms(rows) for rows in chunks] if norms is None else list(norms))
    squares = cheap.double().square_()
    if not each and _is_exact(squares.sum(), sum(rows.numel() for rows in chunks)):
        return squares
    for doubtful, factor in ((cheap < _LOW, _STRETCH), (~(cheap <= _HIGH), 1 / _STRETCH)):  # the latter also if NaN
        if _is_any(doubtful):
            stretched, sizes = torch.zeros_like(cheap), [len(rows) for rows in chunks]
            for rows, where, out in zip(chunks, doubtful.split(sizes), stretched.split(sizes), strict=True):
                _stretch(rows, where, factor, out)
            squares = torch.where(doubtful, (stretched.double() / factor).square_(), squares)
    return squares


def chunk_norms(rows: Tensor) -> Tensor:
    """Returns FP32 [n], the norms of ``rows`` FP32 or BF16 [n, elements of a chunk] on a CPU."""
    if rows.dtype == torch.float32:
        return torch.linalg.vector_norm(rows, dim=1)  # type: ignore[no-any-return]
    blocks = rows.split(max(_BLOCK // rows.shape[1], 1))
    return torch.cat([torch.linalg.vector_norm(block.float(), dim=1) for block in blocks])


def _stretch(rows: Tensor, where: Tensor, factor: float, norms: Tensor) -> None:
    """Writes the ``norms`` FP32 [n] of ``rows`` [n, elements] times ``factor``, at least ``where`` bool [n] is true."""
    size = max(_BLOCK // rows.shape[1], 1)
    # one for all blocks, so that it stays in the cache
    buffer = torch.empty_like(rows[:size], dtype=torch.float32)
    # blocks at fixed places, because a selection of rows would be copied first
    for block, doubtful, out in zip(rows.split(size), where.split(size), norms.split(size), strict=True):
        if _is_any(doubtful):
            torch.linalg.vector_norm(buffer[: len(block)].copy_(block).mul_(factor), dim=1, out=out)


def _is_exact(total: Tensor, numel: int) -> bool:
    """Whether ``total``, on a CPU, of ``numel`` squares is so large and so small that FP32 lost nothing that shows."""
    return numel * _LOST <= float(total) <= _HIGH**2  # not if NaN


def _is_any(where: Tensor) -> bool:
    """Whether an element of ``where``, on a CPU, is true."""
    return bool(where.any())


def sum_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Returns FP64 [n], n >= 1, whose sum is that of the squares of ``tensors``, FP32 or BF16, 1-D; at least one."""
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(list(tensors), dtype=torch.float64)).square_()
    chunks = []
    for tensor in tensors:
        whole = tensor.numel() // _ROW * _ROW
        chunks += [part for part in (tensor[:whole].view(-1, _ROW), tensor[whole:].unsqueeze(0)) if part.numel()]
    return chunk_squares(chunks, each=False) if chunks else tensors[0].new_zeros(1, dtype=torch.float64)
