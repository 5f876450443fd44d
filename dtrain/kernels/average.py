"""The moving average of the weights over tiles of the arena, in one launch and one pass over memory.

The arithmetic is that of ``dtrain.optim.average.MovingAverage``, with its bits if products and sums are not fused.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE = 2048
"""Elements that one program advances."""

NUM_WARPS = 8

FIELDS = 3
"""Number of fields of a row: addresses of master and average, number of elements."""


@triton.jit(do_not_specialize=["first", "count"])
def average(rows, tiles, first, count, code, weight, FIELDS: tl.constexpr, TILE: tl.constexpr):
    """Advances one tile; see ``dtrain.optim.tiled_average.TiledAverage``."""
    tile = tiles + (first + tl.program_id(0)) * 2
    row = rows + tl.load(tile) * FIELDS
    start = tl.load(tile + 1).to(tl.int64) * TILE
    # segments start on chunks, so addresses are multiples of 16 bytes, and accesses are vectors
    master_ptr = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float32)), 16)
    average_ptr = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.float32)), 16)
    numel = tl.multiple_of(tl.load(row + 2), 16)
    skip = tl.load(code) != 0
    index = start + tl.arange(0, TILE)
    mask = index < numel
    old = tl.load(average_ptr + index, mask=mask, other=0.0)
    advanced = (tl.load(master_ptr + index, mask=mask, other=0.0) - old) * weight + old
    # a select: a product with zero would be NaN if the master is Inf
    tl.store(average_ptr + index, tl.where(skip, old, advanced), mask=mask)
