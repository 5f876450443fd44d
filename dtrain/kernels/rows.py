"""Weighted sum of the rows of a matrix, in one launch and one pass over memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dtrain.kernels.tiles import launch

_BLOCK = 2048
_NUM_WARPS = 8


@triton.jit(do_not_specialize=["num_rows"])
def _add_rows(target, rows, weights, numel, stride, num_rows, OVERWRITES: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < numel
    if OVERWRITES:
        total = tl.zeros((BLOCK,), tl.float32)
    else:
        total = tl.load(target + index, mask=mask, other=0.0)
    row = rows
    number = 0
    while number < num_rows:
        total += tl.load(row + index, mask=mask, other=0.0).to(tl.float32) * tl.load(weights + number)
        row += stride
        number += 1
    tl.store(target + index, total, mask=mask)


def add_rows(target: Tensor, rows: Tensor, weights: Tensor, *, overwrites: bool) -> None:
    """Adds the sum of ``rows`` times ``weights``, in the order of the rows, to ``target``, or overwrites it.

    Args:
        target: FP32 [n].
        rows: [k, n] of any floating dtype, each contiguous.
        weights: FP32 [k].
        overwrites: whether the old values of ``target`` are dropped.
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
        OVERWRITES=overwrites,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )
