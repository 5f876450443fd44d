"""Scales and casts: from a tensor to FP8 numbers and the power of two that they are multiplied by.

A scale is a power of two, so that dividing and multiplying by it rounds nothing: what is lost is lost in the cast
alone, an emulation in FP32 gives the bits of the Tensor Core's products, and compiled and eager casts agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_EXPONENT_OF_MAX = {E4M3: 8, E5M2: 15}  # both largest numbers are 1.75 times a power of two: 448 and 57,344


@dataclass(frozen=True)
class Quantized:
    """``values`` times ``scale`` stands for a matrix.

    Attributes:
        values: FP8 [rows, columns], row-major.
        scale: FP32 powers of two, 0-dim, or [rows] where each row has its own. NaN where what was cast was not finite.
    """

    values: Tensor
    scale: Tensor


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest power of two, from 2^-126 on, by which values up to ``amax`` are divided to fit ``dtype``.

    FP32, in the shape of ``amax``. 1 where ``amax`` is 0. NaN where it is not finite: a cast to E4M3 would make 448 of
    Inf, and hide an overflow. Integer arithmetic on the bits of FP32, so that every device and compiler gives the same.
    """
    bits = amax.float().view(torch.int32) & 0x7FFFFFFF  # zeros and NaN may have a sign
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # amax = 1.f * 2^(exponent - 127) fits 1.75 * 2^max where 1.f <= 1.75, else with one power more
    power = exponent - 127 - _EXPONENT_OF_MAX[dtype] + (mantissa > 0x600000).int()
    power = power.clamp(-126, 126)  # so that the scale's reciprocal is a normal number too
    scale = ((power + 127) << 23).view(torch.float32)
    scale = torch.where(bits == 0, 1.0, scale)
    return torch.where(exponent == 255, torch.nan, scale)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``x / scale`` in ``dtype``, what is too large (Inf as well) made the largest number; NaN where ``scale`` is."""
    limit = torch.finfo(dtype).max
    return (x.float() * (1.0 / scale)).clamp(-limit, limit).to(dtype)


def quantize(x: Tensor, dtype: torch.dtype, *, rowwise: bool, compiled: bool = False) -> Quantized:
    """``x`` [rows, columns] in ``dtype`` with scales of its own: one, or one a row.

    Args:
        x: FP32, BF16 or FP16, of any strides.
        dtype: E4M3 or E5M2.
        rowwise: each row has its own scale.
        compiled: run it through ``torch.compile``, which gives the same bits.
    """
    return Quantized(*(_compiled(_quantized, dtype, rowwise) if compiled else _quantized)(x, dtype, rowwise))


def quantize_both(
    x: Tensor, dtype: torch.dtype, *, rowwise: bool, compiled: bool = False
) -> tuple[Quantized, Quantized]:
    """:func:`quantize` of ``x`` and of its transpose, in one: read once where it is compiled."""
    function = _compiled(_quantized_both, dtype, rowwise) if compiled else _quantized_both
    values, scale, transposed, its_scale = function(x, dtype, rowwise)
    return Quantized(values, scale), Quantized(transposed, its_scale)


def decode(values: Tensor) -> Tensor:
    """FP8 ``values`` in FP32."""
    if values.device.type != "cpu":
        return values.float()
    # a CPU decodes E4M3 bit by bit, in eight times the time of this look-up
    indices = values.contiguous().view(torch.uint8).view(-1).int()
    return torch.index_select(_table(values.dtype), 0, indices).view(values.shape)


def dequantize(matrix: Quantized) -> Tensor:
    """What ``matrix`` stands for, in FP32."""
    return decode(matrix.values) * (matrix.scale.unsqueeze(-1) if matrix.scale.dim() else matrix.scale)


def _quantized(x: Tensor, dtype: torch.dtype, rowwise: bool) -> tuple[Tensor, Tensor]:
    scale = scale_of(_amax(x, rowwise=rowwise), dtype)
    return cast(x, scale.unsqueeze(-1) if rowwise else scale, dtype).contiguous(), scale


def _quantized_both(x: Tensor, dtype: torch.dtype, rowwise: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    values, scale = _quantized(x, dtype, rowwise)
    if rowwise:
        return values, scale, *_quantized(x.t(), dtype, rowwise)
    return values, scale, values.t().contiguous(), scale


def _amax(x: Tensor, *, rowwise: bool) -> Tensor:
    if not x.numel():
        return x.new_zeros(x.shape[:1] if rowwise else ())
    if rowwise:
        return x.abs().amax(dim=-1)
    low, high = torch.aminmax(x)  # in one pass, which it is not along a dimension; NaN where there is one
    return torch.maximum(-low, high)


@cache
def _table(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float()


@cache
def _compiled(function: Callable[..., Any], dtype: torch.dtype, rowwise: bool) -> Callable[..., Any]:
    """``function`` for these arguments, once in a process: all Linears share the graphs."""
    # torch keeps eight graphs of a code object, for strides, dtypes and states; what is new it then runs eagerly
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return torch.compile(own, dynamic=True)
