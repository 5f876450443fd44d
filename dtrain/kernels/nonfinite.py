"""Search for the first gradient that is not finite, in one launch over the parameters of a flat buffer."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from dtrain.kernels.tiles import TileTable

_TILE = 8192
_NUM_WARPS = 8
_FIELDS = 3  # offset in the buffer, elements, number of the parameter


@triton.jit(do_not_specialize=["first", "count", "number"])
def _first_nonfinite(rows, tiles, first, count, flat, number, found, FIELDS: tl.constexpr, TILE: tl.constexpr):
    tile = tiles + (first + tl.program_id(0)) * 2
    row = rows + tl.load(tile) * FIELDS
    index = tl.load(tile + 1).to(tl.int64) * TILE + tl.arange(0, TILE)
    start = tl.multiple_of(tl.load(row), 16)
    numel = tl.multiple_of(tl.load(row + 1), 16)
    x = tl.load(flat + start + index, mask=index < numel, other=0.0).to(tl.float32)
    if tl.max((tl.abs(x) < float("inf")).to(tl.int32) ^ 1) != 0:  # NaN too
        tl.atomic_min(found, number + tl.load(row + 2))


class NonfiniteSearch:
    """Finds the first of ``grads`` with an element that is Inf or NaN, without waiting for the device.

    Args:
        grads: numbers and views, which lie in one flat buffer from multiples of 16 elements on. The elements up to the
            next multiple after each are zero. Later searches take views at the same distances.
    """

    def __init__(self, grads: Sequence[tuple[int, Tensor]]) -> None:
        starts = [int(grad.storage_offset()) for _, grad in grads]
        self._lowest = starts.index(min(starts))
        # rounded up into the zeros that follow, so that accesses are vectors
        sizes = [-(-grad.numel() // 16) * 16 for _, grad in grads]
        rows = [[start - min(starts), size, n] for start, size, (n, _) in zip(starts, sizes, grads, strict=True)]
        self._table = TileTable(rows, [-(-size // _TILE) for size in sizes], grads[0][1].device)

    def search(self, grads: Sequence[tuple[int, Tensor]], number: int, found: Tensor) -> None:
        """Lowers ``found`` int64, 0-dim, to ``number`` + the number of the first gradient that is not finite."""
        _, lowest = grads[self._lowest]
        self._table.launch(_first_nonfinite, lowest, number, found, FIELDS=_FIELDS, TILE=_TILE, num_warps=_NUM_WARPS)
