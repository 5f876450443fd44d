"""FP8 weights on a GPU: their scales, casts and transposes, each in one launch for all weights.

The bits are those of ``dtrain.precision.float8.cast``. Largest magnitudes are maxima of the bits of non-negative
FP32 numbers as integers, which order as the numbers do. So atomic operations give the same bits in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import target_info

from dtrain.kernels.tiles import TileTable, launch

_ROWS, _COLUMNS, _NUM_WARPS = 32, 256, 4
_SIDE = 128  # of a tile of a transpose
_BLOCK = 1024  # scales of a program
ROWS, COLUMNS, SIDE = tl.constexpr(_ROWS), tl.constexpr(_COLUMNS), tl.constexpr(_SIDE)  # as kernels take them


@triton.jit
def magnitude(x):
    """Returns the bits of FP32 |x|, those of Inf if x is NaN."""
    return tl.minimum(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F800000)


@triton.jit
def scale_of(bits, DTYPE: tl.constexpr):
    """Returns the scale for the largest magnitude, the bits of a non-negative FP32 number."""
    EXPONENT_OF_MAX: tl.constexpr = 8 if DTYPE.is_fp8e4nv() else 15
    exponent = bits >> 23
    power = exponent - 127 - EXPONENT_OF_MAX + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    power = tl.minimum(tl.maximum(power, -126), 126)
    scale = tl.where(bits == 0, 1.0, ((power + 127) << 23).to(tl.float32, bitcast=True))
    return tl.where(exponent >= 255, float("nan"), scale)


@triton.jit
def cast(x, scale, DTYPE: tl.constexpr):
    """Casts FP32 ``x / scale`` to DTYPE, E4M3 or E5M2, saturating; the result is NaN if one of them is."""
    LIMIT: tl.constexpr = 448.0 if DTYPE.is_fp8e4nv() else 57344.0
    # the exact reciprocal of a power of two, because a division may be an approximation
    reciprocal = (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    y = x * tl.where(scale == scale, reciprocal, scale)
    # not tl.clamp: Triton 3.8 may store garbage in the transpose of an FP8 tile after the min.NaN that it becomes
    y = tl.where((y < LIMIT) | (y != y), y, LIMIT)
    y = tl.where((y > -LIMIT) | (y != y), y, -LIMIT)
    if not target_info.cuda_capability_geq(9, 0):
        # Ada casts by way of FP16; a last bit that stands for all below it keeps it from rounding twice
        bits = y.to(tl.int32, bitcast=True)
        y = ((bits & -0x40000) | tl.where((bits & 0x3FFFF) != 0, 0x40000, 0)).to(tl.float32, bitcast=True)
    return y.to(DTYPE)


@triton.jit
def _load(rows, tiles, first, FIELDS: tl.constexpr, ALIGNED: tl.constexpr):
    """Returns a tile: its table row, its elements, its rows and columns, where it begins, and its offsets from there.

    Then masks of the offsets, of the rows and of the columns, and the scale of the first of its columns in blocks.
    """
    tile = tiles + (first + tl.program_id(0)) * 2
    row = rows + tl.load(tile) * FIELDS
    number = tl.load(tile + 1)
    width, start, stop, first_row = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5), tl.load(row + 6)
    if ALIGNED:  # else elements are accessed one by one
        width, start, stop = tl.multiple_of(width, 16), tl.multiple_of(start, 16), tl.multiple_of(stop, 16)
    across = tl.cdiv(width.to(tl.int32), COLUMNS)
    top, left = first_row + number // across * ROWS, number % across * COLUMNS
    begin = top * width + left
    i, j = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    offsets = i[:, None] * width.to(tl.int32) + j[None, :]
    low, high = tl.maximum(start - begin, 0).to(tl.int32), tl.minimum(stop - begin, 0x7FFFFFF0).to(tl.int32)
    if ALIGNED:
        low, high = tl.multiple_of(low, 16), tl.multiple_of(high, 16)
    has_row, has_column = (top + i) * width < stop, left + j < width
    mask = (offsets >= low) & (offsets < high) & has_column[None, :]
    block = tl.load(row + 7) + top // 128 * tl.cdiv(width, 128) + left // 128  # no tile has rows of two blocks
    master = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float32)), 16)
    x = tl.load(master + begin + offsets, mask=mask, other=0.0)
    return row, x, top + i, left + j, begin, offsets, mask, has_row, has_column, block


@triton.jit
def _measure(rows, tiles, first, count, amax, HEIGHT: tl.constexpr, FIELDS: tl.constexpr, ALIGNED: tl.constexpr):
    """Raises ``amax`` to a tile's largest magnitudes; ``HEIGHT`` is that of a block that shares a scale, or 0: all."""
    row, x, i, j, _, _, _, has_row, has_column, block = _load(rows, tiles, first, FIELDS, ALIGNED)
    bits = magnitude(x)
    if HEIGHT == 128:
        k = tl.arange(0, COLUMNS // 128)
        largest = tl.max(tl.reshape(tl.max(bits, axis=0), (COLUMNS // 128, 128)), axis=1)
        tl.atomic_max(amax + block + k, largest, mask=k * 128 < tl.load(row + 3) - tl.min(j), sem="relaxed")
    elif HEIGHT == 1:
        tl.atomic_max(amax + tl.load(row + 7) + i, tl.max(bits, axis=1), mask=has_row, sem="relaxed")
        tl.atomic_max(amax + tl.load(row + 8) + j, tl.max(bits, axis=0), mask=has_column, sem="relaxed")
    else:
        tl.atomic_max(amax + tl.load(row + 7), tl.max(bits), sem="relaxed")


@triton.jit
def _cast(rows, tiles, first, count, scale, HEIGHT: tl.constexpr, FIELDS: tl.constexpr, ALIGNED: tl.constexpr):
    row, x, i, j, begin, offsets, mask, has_row, has_column, block = _load(rows, tiles, first, FIELDS, ALIGNED)
    E4M3: tl.constexpr = tl.float8e4nv
    values = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(E4M3)), 16) + begin + offsets
    if HEIGHT == 128:
        of_columns = tl.load(scale + block + tl.arange(0, COLUMNS) // 128, mask=has_column, other=1.0)
        tl.store(values, cast(x, of_columns[None, :], E4M3), mask=mask)
    elif HEIGHT == 1:
        of_rows = tl.load(scale + tl.load(row + 7) + i, mask=has_row, other=1.0)
        of_columns = tl.load(scale + tl.load(row + 8) + j, mask=has_column, other=1.0)
        tl.store(values, cast(x, of_rows[:, None], E4M3), mask=mask)
        second = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(E4M3)), 16) + begin + offsets
        tl.store(second, cast(x, of_columns[None, :], E4M3), mask=mask)
    else:
        tl.store(values, cast(x, tl.load(scale + tl.load(row + 7)), E4M3), mask=mask)


@dataclass(frozen=True)
class WeightShard:
    """Row-major elements of an FP8 weight from ``start`` on.

    Attributes:
        master: FP32 [numel].
        copies: their quantized copies, each E4M3 [numel].
        width: elements of a row of the weight.
        first_scales: index of the first scale of each copy.
    """

    master: Tensor
    copies: Sequence[Tensor]
    start: int
    width: int
    first_scales: Sequence[int]


class ShardCasts:
    """The casts of the shards of all weights on a rank.

    Args:
        shards: which this object keeps, because the kernels know their addresses.
        sides: of a block that shares a scale: (0, 0) all, (1, 0) a row, and a column in the second copy, (128, 128).
    """

    def __init__(self, shards: Sequence[WeightShard], sides: tuple[int, int]) -> None:
        self._shards = shards
        found = [_row(shard, sides) for shard in shards]
        table_rows, num_tiles = [row for row, _ in found], [tiles for _, tiles in found]
        device = shards[0].master.device if shards else torch.device("cpu")  # a rank may have none
        self._table = TileTable(table_rows, num_tiles, device)
        is_aligned = all(value % 16 == 0 for row in table_rows for value in row[:6])
        num_warps = _NUM_WARPS if is_aligned else 2 * _NUM_WARPS  # else registers would spill
        self._options = {"HEIGHT": sides[0], "FIELDS": 9, "ALIGNED": is_aligned, "num_warps": num_warps}

    def measure(self, amax: Tensor) -> None:
        """Raises ``amax``, FP32 [all scales], to the largest magnitudes of the masters; Inf stands for NaN."""
        self._table.launch(_measure, amax.view(torch.int32), **self._options)

    def cast(self, scale: Tensor) -> None:
        """Casts the masters into the copies with ``scale``, FP32 [all scales]."""
        self._table.launch(_cast, scale, **self._options)


def _row(shard: WeightShard, sides: tuple[int, int]) -> tuple[list[int], int]:
    """Returns the table row of ``shard`` and its number of tiles; with one scale it is cut in rows of any width."""
    width, start = (shard.width, shard.start) if sides[0] else (_COLUMNS, 0)
    stop = start + shard.master.numel()
    copies = [copy.data_ptr() - start for copy in shard.copies]
    first_row = start // width
    first_row -= first_row % _ROWS if sides[1] else 0  # so that a tile lies in one row of blocks
    num_rows = (stop - 1) // width - first_row + 1
    row = [shard.master.data_ptr() - 4 * start, copies[0], copies[-1], width, start, stop, first_row]
    if any(address % 16 for address in row[:3]):
        raise ValueError(f"a weight and its copies start at {row[:3]}; expected multiples of 16 bytes")
    row += [shard.first_scales[0], shard.first_scales[-1]]
    return row, triton.cdiv(num_rows, _ROWS) * triton.cdiv(width, _COLUMNS)


@triton.jit
def _scales(amax, scale, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    largest = tl.load(amax + index, mask=mask, other=0.0)
    tl.store(scale + index, scale_of(magnitude(largest), tl.float8e4nv), mask=mask)


def set_scales(amax: Tensor, scale: Tensor) -> None:
    """Sets ``scale`` to that of the largest magnitudes ``amax``, both FP32 [all scales]."""
    launch(_scales, triton.cdiv(amax.numel(), _BLOCK), amax.device, amax, scale, amax.numel(), BLOCK=_BLOCK)


@triton.jit
def _transpose(rows, tiles, first, count, source, target, FIELDS: tl.constexpr, ALIGNED: tl.constexpr):
    tile = tiles + (first + tl.program_id(0)) * 2
    row = rows + tl.load(tile) * FIELDS
    number = tl.load(tile + 1)
    num_rows, num_columns = tl.load(row + 2), tl.load(row + 3)
    padded_rows, padded_columns = tl.multiple_of(tl.load(row + 4), 16), tl.multiple_of(tl.load(row + 5), 16)
    if ALIGNED:
        num_rows, num_columns = tl.multiple_of(num_rows, 16), tl.multiple_of(num_columns, 16)
    across = tl.cdiv(padded_columns, SIDE)
    i = (number // across) * SIDE + tl.arange(0, SIDE)
    j = (number % across) * SIDE + tl.arange(0, SIDE)
    values = source + tl.multiple_of(tl.load(row), 16)
    mask = (i < num_rows)[:, None] & (j < num_columns)[None, :]
    x = tl.load(values + i[:, None] * num_columns + j[None, :], mask=mask, other=0)
    turned = target + tl.multiple_of(tl.load(row + 1), 16)
    mask = (j < padded_columns)[:, None] & (i < padded_rows)[None, :]
    tl.store(turned + j[:, None] * padded_rows + i[None, :], tl.trans(x), mask=mask)


class Transposes:
    """The transposes [K, N] of several FP8 matrices [N, K], padded with zeros to multiples of ``alignment``.

    Args:
        matrices: row-major. Their distances in memory stay, so they may move together.
    """

    def __init__(self, matrices: Sequence[Tensor], alignment: int) -> None:
        table_rows: list[list[int]] = []
        num_tiles = []
        self._numel = 0
        for matrix in matrices:
            sizes = [size + -size % alignment for size in matrix.shape]
            table_rows.append([matrix.data_ptr() - matrices[0].data_ptr(), self._numel, *matrix.shape, *sizes])
            num_tiles.append(triton.cdiv(sizes[0], _SIDE) * triton.cdiv(sizes[1], _SIDE))
            self._numel += sizes[0] * sizes[1]
        self._table = TileTable(table_rows, num_tiles, matrices[0].device)
        self._targets = [(row[1], row[5], row[4]) for row in table_rows]
        is_aligned = all(value % 16 == 0 for row in table_rows for value in row)
        self._options = {"FIELDS": 6, "ALIGNED": is_aligned, "num_warps": _NUM_WARPS}

    def __call__(self, first: Tensor) -> list[Tensor]:
        """Returns the transposes, slices of one new tensor, if the matrices now begin with ``first``."""
        flat = torch.empty(self._numel, dtype=first.dtype, device=first.device)
        self._table.launch(_transpose, first.view(torch.uint8), flat.view(torch.uint8), **self._options)
        return [flat[start : start + rows * columns].view(rows, columns) for start, rows, columns in self._targets]
