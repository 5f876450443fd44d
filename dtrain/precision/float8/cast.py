"""The FP8 cast: quantizes a tensor to FP8 values and power-of-two scales.

Scales are powers of two because dividing and multiplying by them is exact. Only the cast rounds, so that the FP32
emulation gives the bits of the products on Tensor Cores, and kernels, compiled and eager casts agree.
"""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.precision.fake import is_fake

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_EXPONENT_OF_MAX = {E4M3: 8, E5M2: 15}  # both largest numbers are 1.75 times a power of two: 448 and 57,344

_ONE, _NAN = 0x3F800000, 0x7FC00000  # bits of FP32

BLOCK = 128
"""Side of a block that has its own scale."""


class Scaling(Enum):
    """Which elements of a matrix [M, K] share a scale: the sides of a block of them; 0: the whole side.

    Attributes:
        TENSOR: all; the scale is 0-dim.
        ROWS: those of a row; the scales are [M].
        LINES: 128 of a row; the scales are [M, ceil(K / 128)], with strides (1, M).
        SQUARES: 128 x 128; the scales are [ceil(M / 128), ceil(K / 128)].
    """

    TENSOR = (0, 0)
    ROWS = (1, 0)
    LINES = (1, BLOCK)
    SQUARES = (BLOCK, BLOCK)

    @property
    def in_blocks(self) -> bool:
        """Whether a row has several scales."""
        return self.value[1] > 0

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Returns the shape of the scales of a matrix [rows, columns]."""
        sides = zip(self.value, (rows, columns), strict=True)
        return tuple(-(-size // side) for side, size in sides if side)


class Quantized(NamedTuple):
    """An FP8 matrix that represents ``values * scale``.

    Attributes:
        values: FP8 [rows, columns], row-major.
        scale: FP32 powers of two, in the shape that ``Scaling`` gives. NaN if one of their values was not finite.
    """

    values: Tensor
    scale: Tensor


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the smallest power of two, at least 2^-126, by which values up to ``amax`` are divided to fit ``dtype``.

    The result is FP32 in the shape of ``amax``. It is 1 if ``amax`` is 0, and NaN if ``amax`` is not finite, because a
    saturating cast of Inf to E4M3 gives 448 and would hide an overflow.
    """
    # integer arithmetic on the bits of FP32: every device and compiler gives the same scale
    bits = amax.float().view(torch.int32) & 0x7FFFFFFF  # drops the sign, which zeros and NaN may have
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # amax = 1.f * 2^(exponent - 127) fits 1.75 * 2^max if 1.f <= 1.75, else it needs one power more
    power = exponent - 127 - _EXPONENT_OF_MAX[dtype] + (mantissa > 0x600000).int()
    power = power.clamp(-126, 126)  # keeps the reciprocal a normal number
    found = torch.where(bits == 0, _ONE, (power + 127) << 23)
    # NaN by its bits: a compiler that merges equal operations takes no two NaN as equal, and would cast for each Linear
    return torch.where(exponent == 255, _NAN, found).view(torch.float32)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype, *, traced: bool = False) -> Tensor:
    """Casts ``x / scale`` to ``dtype``, saturating; the result is NaN if ``scale`` is.

    Args:
        traced: for the graph of a compiler; the result is the same.
    """
    limit = torch.finfo(dtype).max
    y = x.float() * (1.0 / scale)
    if not traced:
        return y.clamp(-limit, limit).to(dtype)
    # Triton 3.8 may store garbage in the transpose of an FP8 tile after the min.NaN that a clamp becomes
    y = torch.where((y < limit) | (y != y), y, limit)
    return torch.where((y > -limit) | (y != y), y, -limit).to(dtype)


def uses_kernels(device: torch.device, *, compiled: bool) -> bool:
    """Whether casts run as Triton kernels: with ``compiled``, on a GPU."""
    return compiled and device.type == "cuda"


def decode(values: Tensor) -> Tensor:
    if values.device.type != "cpu":
        return values.float()
    # PyTorch decodes E4M3 bit by bit on CPU, which takes eight times as long as this look-up
    indices = values.contiguous().view(torch.uint8).view(-1).int()
    # the kept table is real, and fake tensors meet only their own kind
    table = (_table.__wrapped__ if is_fake(values) else _table)(values.dtype)
    return torch.index_select(table, 0, indices).view(values.shape)


def dequantize(matrix: Quantized) -> Tensor:
    return decode(matrix.values) * spread(matrix.scale, matrix.values.shape)


def spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """Returns the scale of each element of a matrix of ``shape``: ``scale`` in a shape that broadcasts to it."""
    if scale.dim() < 2:
        return scale.unsqueeze(-1) if scale.dim() else scale
    if scale.shape[0] != shape[0]:
        scale = scale.unsqueeze(1).expand(-1, BLOCK, -1).flatten(0, 1)[: shape[0]]
    return scale.unsqueeze(2).expand(-1, -1, BLOCK).flatten(1)[:, : shape[1]]


def quantize(x: Tensor, dtype: torch.dtype, scaling: Scaling, *, traced: bool = False) -> Quantized:
    """Quantizes ``x`` [rows, columns], in FP32, BF16 or FP16 and of any strides, to ``dtype``, E4M3 or E5M2.

    ``scaling``: which elements share a scale; ``traced``: see ``cast``.
    """
    scale = scale_of(_amax(x, scaling, traced), dtype)
    if scaling is Scaling.LINES:
        scale = scale.t().contiguous().t()  # as the products take it
    return Quantized(cast(x, spread(scale, x.shape), dtype, traced=traced).contiguous(), scale)


def quantized_both(x: Tensor, dtype: torch.dtype, scaling: Scaling, *, traced: bool = False) -> tuple[Tensor, ...]:
    """Returns values and scale of ``x``, then those of its transpose."""
    values, scale = quantize(x, dtype, scaling, traced=traced)
    if scaling is Scaling.TENSOR:
        return values, scale, values.t().contiguous(), scale
    # with scales of its own, so the values differ too
    return values, scale, *quantize(x.t(), dtype, scaling, traced=traced)


def _amax(x: Tensor, scaling: Scaling, traced: bool) -> Tensor:
    if not x.numel():
        return x.new_zeros(scaling.shape(*x.shape))
    if scaling.in_blocks:
        height, width = scaling.value
        rows, columns = scaling.shape(*x.shape)
        pad = (0, columns * width - x.shape[1], 0, rows * height - x.shape[0])
        whole = F.pad(x, pad) if any(pad) else x
        blocks: Tensor = whole.unflatten(1, (columns, width)).unflatten(0, (rows, height))
        return blocks.abs().amax(dim=(1, 3))
    if scaling is Scaling.TENSOR and not traced:
        minimum, maximum = torch.aminmax(x)  # one pass; propagates NaN
        return torch.maximum(-minimum, maximum)
    of_rows = x.abs().amax(dim=-1)  # first, as the norms before it reduce
    return of_rows if scaling is Scaling.ROWS else of_rows.amax()


@cache
def _table(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float()
