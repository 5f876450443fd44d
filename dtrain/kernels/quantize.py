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

from dtrain.kernels.float8 import divided, magnitude, scale_of
from dtrain.kernels.tiles import launch

_ROWS, _COLUMNS, _NUM_WARPS = 128, 64, 4
_FORMATS = {torch.float8_e4m3fn: (tl.float8e4nv, 8, 448.0), torch.float8_e5m2: (tl.float8e5, 15, 57344.0)}


@triton.jit
def _load(x, num_rows, num_columns, row_stride, column_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns this program's tile in FP32, zero outside the matrix, and its row and column numbers."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    offsets = rows.to(tl.int64)[:, None] * row_stride + columns.to(tl.int64)[None, :] * column_stride
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    return tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32), rows, columns, mask


@triton.jit
def _measure(
    x,
    amax,
    num_rows,
    num_columns,
    row_stride,
    column_stride,
    first_column,
    ROWWISE: tl.constexpr,
    BOTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tile, rows, columns, _ = _load(x, num_rows, num_columns, row_stride, column_stride, ROWS, COLUMNS)
    bits = magnitude(tile)
    if ROWWISE:
        tl.atomic_max(amax + rows, tl.max(bits, axis=1), mask=rows < num_rows, sem="relaxed")
        if BOTH:
            tl.atomic_max(
                amax + first_column + columns, tl.max(bits, axis=0), mask=columns < num_columns, sem="relaxed"
            )
    else:
        tl.atomic_max(amax, tl.max(bits), sem="relaxed")


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
    BLOCKS: tl.constexpr,
    BOTH: tl.constexpr,
    DTYPE: tl.constexpr,
    EXPONENT_OF_MAX: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tile, rows, columns, mask = _load(x, num_rows, num_columns, row_stride, column_stride, ROWS, COLUMNS)
    is_first_row, is_first_column = tl.program_id(0) == 0, tl.program_id(1) == 0
    # blocks: the scales of rows lie by column of blocks, those of columns by row of blocks
    if BLOCKS or ROWWISE:
        first = tl.program_id(1) * num_rows if BLOCKS else 0
        found = tl.max(magnitude(tile), axis=1) if BLOCKS else tl.load(amax + rows, mask=rows < num_rows, other=0)
        row_scale = scale_of(found, EXPONENT_OF_MAX)
        tl.store(scale + first + rows, row_scale, mask=(rows < num_rows) & (is_first_column | BLOCKS))
        by_row = divided(tile, row_scale[:, None], LIMIT).to(DTYPE)
    else:
        one_scale = scale_of(tl.load(amax), EXPONENT_OF_MAX)
        tl.store(scale, one_scale, mask=is_first_row & is_first_column)
        by_row = divided(tile, one_scale, LIMIT).to(DTYPE)
    offsets = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    tl.store(values + offsets, by_row, mask=mask)
    if BOTH:
        if BLOCKS or ROWWISE:
            first = first_column + (tl.program_id(0) * num_columns if BLOCKS else 0)
            has_column = columns < num_columns
            found = (
                tl.max(magnitude(tile), axis=0)
                if BLOCKS
                else tl.load(amax + first_column + columns, mask=has_column, other=0)
            )
            column_scale = scale_of(found, EXPONENT_OF_MAX)
            tl.store(scale + first + columns, column_scale, mask=has_column & (is_first_row | BLOCKS))
            by_column = divided(tile, column_scale[None, :], LIMIT).to(DTYPE)
        else:
            by_column = by_row
        turned = columns.to(tl.int64)[:, None] * num_rows + rows[None, :]
        tl.store(transposed + turned, tl.trans(by_column), mask=tl.trans(mask))


def quantize(
    x: Tensor, dtype: torch.dtype, sides: tuple[int, int], *, both: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantizes ``x`` [rows, columns] and, with ``both``, its transpose; returns values and scale of each.

    Args:
        x: FP32, BF16 or FP16, of any strides; with at least one element.
        dtype: E4M3 or E5M2.
        sides: of a block that shares a scale: (0, 0) all, (1, 0) a row, (1, 128) a part of a row.
        both: whether the transpose is wanted; else the last two tensors are empty, or those of ``x``.
    """
    num_rows, num_columns = x.shape
    has_one, blocks = not sides[0], sides[1] > 0
    rows, columns = (sides[1], sides[1]) if blocks else (_ROWS, _COLUMNS)
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(num_columns, columns))
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
    options = {
        "ROWWISE": not has_one and not blocks,
        "BOTH": both,
        "ROWS": rows,
        "COLUMNS": columns,
        "num_warps": num_warps,
    }
    target, exponent_of_max, limit = _FORMATS[dtype]
    if not blocks:
        launch(_measure, grid, x.device, x, amax, *sizes, **options)
    launch(
        _cast,
        grid,
        x.device,
        x,
        amax,
        scale,
        values,
        transposed,
        *sizes,
        BLOCKS=blocks,
        DTYPE=target,
        EXPONENT_OF_MAX=exponent_of_max,
        LIMIT=limit,
        **options,
    )
    if has_one:
        return values, scale[0], transposed, scale[0]
    own, second = scale[:of_rows], scale[first_column:]
    if blocks:
        own, second = own.view(grid[1], num_rows).t(), second.view(grid[0] if both else 0, num_columns).t()
    return values, own, transposed, second
