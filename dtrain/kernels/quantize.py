"""FP8 quantization of a matrix on a GPU: one kernel for the largest magnitudes, one that casts in both orders.

The bits are those of ``dtrain.precision.float8.cast``. The second kernel writes the values and their transpose from
one tile, which it turns in shared memory, so that both are written in whole lines. Blocks of 128 need this kernel
alone: a tile has all of their elements, in both orders.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtrain.kernels.float8 import cast, magnitude, scale_of
from dtrain.kernels.tiles import launch

_ROWS, _COLUMNS, _NUM_WARPS = 128, 64, 4  # of a tile; in blocks it is 128 x 128
ROWS, COLUMNS = tl.constexpr(_ROWS), tl.constexpr(_COLUMNS)  # as kernels take them


@triton.jit
def _load(x, num_rows, num_columns, row_stride, column_stride, WIDTH: tl.constexpr):
    """Returns this program's tile in FP32, zero outside the matrix, its row and column numbers, and its mask."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    offsets = rows.to(tl.int64)[:, None] * row_stride + columns.to(tl.int64)[None, :] * column_stride
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    return tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32), rows, columns, mask


@triton.jit
def _measure(
    x, amax, num_rows, num_columns, row_stride, column_stride, first_column, ROWWISE: tl.constexpr, BOTH: tl.constexpr
):
    tile, rows, columns, _ = _load(x, num_rows, num_columns, row_stride, column_stride, COLUMNS)
    bits = magnitude(tile)
    if ROWWISE:
        tl.atomic_max(amax + rows, tl.max(bits, axis=1), mask=rows < num_rows, sem="relaxed")
        if BOTH:
            by_column = amax + first_column + columns
            tl.atomic_max(by_column, tl.max(bits, axis=0), mask=columns < num_columns, sem="relaxed")
    else:
        tl.atomic_max(amax, tl.max(bits), sem="relaxed")


@triton.jit
def _scales(tile, amax, scale, lines, count, AXIS: tl.constexpr, BLOCKS: tl.constexpr, DTYPE: tl.constexpr):
    """Returns and stores the scales of the ``lines`` of a tile: of its rows with ``AXIS`` 1, of its columns with 0.

    In blocks those of rows lie by column of blocks, those of columns by row of blocks.
    """
    number, is_line = tl.program_id(AXIS), lines < count
    largest = tl.max(magnitude(tile), axis=AXIS) if BLOCKS else tl.load(amax + lines, mask=is_line, other=0)
    found = scale_of(largest, DTYPE)
    tl.store(scale + (number * count if BLOCKS else 0) + lines, found, mask=is_line & ((number == 0) | BLOCKS))
    return found


@triton.jit
def _cast(
    x,
    amax,
    scale,
    values,
    transposed,
    num_rows,
    num_columns,
    row_stride,
    column_stride,
    first_column,
    ROWWISE: tl.constexpr,
    BOTH: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    tile, rows, columns, mask = _load(x, num_rows, num_columns, row_stride, column_stride, ROWS if BLOCKS else COLUMNS)
    DTYPE: tl.constexpr = values.dtype.element_ty
    if ROWWISE:
        row_scale = _scales(tile, amax, scale, rows, num_rows, 1, BLOCKS, DTYPE)
        by_row = cast(tile, row_scale[:, None], DTYPE)
    else:
        one_scale = scale_of(tl.load(amax), DTYPE)
        tl.store(scale, one_scale, mask=(tl.program_id(0) == 0) & (tl.program_id(1) == 0))
        by_row = cast(tile, one_scale, DTYPE)
    tl.store(values + rows.to(tl.int64)[:, None] * num_columns + columns[None, :], by_row, mask=mask)
    if BOTH:
        by_column = by_row
        if ROWWISE:
            amax, scale = amax + first_column, scale + first_column
            column_scale = _scales(tile, amax, scale, columns, num_columns, 0, BLOCKS, DTYPE)
            by_column = cast(tile, column_scale[None, :], DTYPE)
        turned = columns.to(tl.int64)[:, None] * num_rows + rows[None, :]
        tl.store(transposed + turned, tl.trans(by_column), mask=tl.trans(mask))


def quantize(x: Tensor, dtype: torch.dtype, sides: tuple[int, int], *, both: bool) -> tuple[Tensor, ...]:
    """Quantizes ``x`` [rows, columns] and, with ``both``, its transpose; returns values and scale of each.

    Args:
        x: FP32, BF16 or FP16, of any strides; with at least one element.
        dtype: E4M3 or E5M2.
        sides: of a block that shares a scale: (0, 0) all, (1, 0) a row, (1, 128) a part of a row.
    """
    num_rows, num_columns = x.shape
    has_one, blocks = not sides[0], sides[1] > 0
    grid = (triton.cdiv(num_rows, _ROWS), triton.cdiv(num_columns, _ROWS if blocks else _COLUMNS))
    of_rows, of_columns = (num_rows * grid[1], num_columns * grid[0]) if blocks else (num_rows, num_columns)
    first_column = of_rows + -of_rows % 4  # on 16 bytes: [Note: rules of scaled_mm]
    num_scales = 1 if has_one else first_column + of_columns if both else of_rows
    amax = torch.zeros(0 if blocks else num_scales, dtype=torch.int32, device=x.device)
    scale = torch.empty(num_scales, dtype=torch.float32, device=x.device)
    values = torch.empty(num_rows, num_columns, dtype=dtype, device=x.device)
    transposed = torch.empty((num_columns, num_rows) if both else (0, 0), dtype=dtype, device=x.device)
    sizes = (num_rows, num_columns, *x.stride(), first_column)
    is_aligned = num_rows % 16 == 0 and num_columns % 16 == 0
    num_warps = _NUM_WARPS if is_aligned and not blocks else 2 * _NUM_WARPS  # else registers would spill
    options = {"ROWWISE": not has_one, "BOTH": both, "num_warps": num_warps}
    if not blocks:
        launch(_measure, grid, x.device, x, amax, *sizes, **options)
    launch(_cast, grid, x.device, x, amax, scale, values, transposed, *sizes, BLOCKS=blocks, **options)
    own, second = (scale[0],) * 2 if has_one else (scale[:of_rows], scale[first_column:])
    if blocks:
        own, second = own.view(grid[1], num_rows).t(), second.view(-1, num_columns).t()
    return (values, own, transposed, second) if both else (values, own)
