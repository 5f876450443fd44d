"""Weighted sum of the rows of a matrix, in one launch and one pass over memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dtrain.kernels.tiles import launch

_BLOCK = 2048
_NUM_WARPS = 8


@triton.jit
def _random_bits(index, start, first_word, second_word):
    """The bits of ``dtrain.optim.stochastic.random_bits`` for elements ``index``."""
    bits = (index.to(tl.int32) + start).to(tl.uint32, bitcast=True)
    bits = bits ^ first_word.to(tl.uint32, bitcast=True)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = bits ^ second_word.to(tl.uint32, bitcast=True)
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit(do_not_specialize=["num_rows"])
def _add_rows(
    target,
    rows,
    weights,
    numel,
    stride,
    num_rows,
    start,
    first_word,
    second_word,
    OVERWRITES: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < numel
    if OVERWRITES:
        total = tl.zeros((BLOCK,), tl.float32)
    else:
        total = tl.load(target + index, mask=mask, other=0.0).to(tl.float32)
    row = rows
    number = 0
    while number < num_rows:
        total += tl.load(row + index, mask=mask, other=0.0).to(tl.float32) * tl.load(weights + number)
        row += stride
        number += 1
    if ROUNDS:
        noise = _random_bits(index, tl.load(start), tl.load(first_word), tl.load(second_word)) & 0xFFFF
        rounded = (total.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000
        # the bits of a NaN may carry into its sign
        total = tl.where(total == total, rounded.to(tl.float32, bitcast=True), total)
    tl.store(target + index, total.to(target.dtype.element_ty), mask=mask)


def add_rows(
    target: Tensor,
    rows: Tensor,
    weights: Tensor,
    *,
    overwrites: bool,
    noise: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Adds the sum of ``rows`` times ``weights``, in the order of the rows, to ``target``, or overwrites it.

    Args:
        target: [n], FP32, or BF16 with ``noise``.
        rows: [k, n] of any floating dtype, each contiguous.
        weights: FP32 [k].
        overwrites: whether the old values of ``target`` are dropped.
        noise: ``Noise`` of ``dtrain.optim.stochastic`` for the first element; it rounds the FP32 sum to BF16.
    """
    numel, num_rows = target.numel(), rows.shape[0]
    launch(
        _add_rows,
        triton.cdiv(numel, _BLOCK),
        target.device,
        target,
        rows,
        weights,
        numel,
        rows.stride(0),
        num_rows,
        *(noise or (weights, weights, weights)),
        OVERWRITES=overwrites,
        ROUNDS=noise is not None,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )
