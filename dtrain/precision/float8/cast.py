"""The FP8 cast: quantizes a tensor to FP8 values and power-of-two scales.

Scales are powers of two because dividing and multiplying by them is exact. Only the cast rounds, so that the FP32
emulation gives the bits of ``torch._scaled_mm``, and compiled and eager casts agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dtrain.precision.fake import is_fake

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_EXPONENT_OF_MAX = {E4M3: 8, E5M2: 15}  # both largest numbers are 1.75 times a power of two: 448 and 57,344


@dataclass(frozen=True)
class Quantized:
    """An FP8 matrix that represents ``values * scale``.

    Attributes:
        values: FP8 [rows, columns], row-major.
        scale: FP32 powers of two; 0-dim, or [rows] if each row has its own. NaN if a value was not finite.
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
    scale = ((power + 127) << 23).view(torch.float32)
    scale = torch.where(bits == 0, 1.0, scale)
    return torch.where(exponent == 255, torch.nan, scale)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts ``x / scale`` to ``dtype``, saturating; the result is NaN if ``scale`` is."""
    limit = torch.finfo(dtype).max
    return (x.float() * (1.0 / scale)).clamp(-limit, limit).to(dtype)


def uses_kernels(device: torch.device, *, compiled: bool) -> bool:
    """Whether casts run as Triton kernels; compiled casts do on a GPU, and on a CPU through ``torch.compile``."""
    return compiled and device.type == "cuda"


def quantize(x: Tensor, dtype: torch.dtype, *, rowwise: bool) -> Quantized:
    """Quantizes ``x`` [rows, columns] to ``dtype`` with one scale, or with one scale per row.

    Args:
        x: FP32, BF16 or FP16, of any strides.
        dtype: E4M3 or E5M2.
        rowwise: whether each row has its own scale.
    """
    return Quantized(*quantized(x, dtype, rowwise))


def decode(values: Tensor) -> Tensor:
    if values.device.type != "cpu":
        return values.float()
    # PyTorch decodes E4M3 bit by bit on CPU, which takes eight times as long as this look-up
    indices = values.contiguous().view(torch.uint8).view(-1).int()
    # the kept table is real, and fake tensors meet only their own kind
    table = _new_table(values.dtype) if is_fake(values) else _table(values.dtype)
    return torch.index_select(table, 0, indices).view(values.shape)


def dequantize(matrix: Quantized) -> Tensor:
    return decode(matrix.values) * (matrix.scale.unsqueeze(-1) if matrix.scale.dim() else matrix.scale)


def quantized(x: Tensor, dtype: torch.dtype, rowwise: bool) -> tuple[Tensor, Tensor]:
    """Returns the values and the scale of ``quantize``."""
    scale = scale_of(_amax(x, rowwise=rowwise), dtype)
    return cast(x, scale.unsqueeze(-1) if rowwise else scale, dtype).contiguous(), scale


def quantized_both(x: Tensor, dtype: torch.dtype, rowwise: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns values and scale of ``x``, then those of its transpose."""
    values, scale = quantized(x, dtype, rowwise)
    if rowwise:  # the transpose has scales of its own, so the values differ too
        return values, scale, *quantized(x.t(), dtype, rowwise)
    return values, scale, values.t().contiguous(), scale


def _amax(x: Tensor, *, rowwise: bool) -> Tensor:
    if not x.numel():
        return x.new_zeros(x.shape[:1] if rowwise else ())
    if rowwise:
        return x.abs().amax(dim=-1)
    minimum, maximum = torch.aminmax(x)  # one pass; propagates NaN
    return torch.maximum(-minimum, maximum)


@cache
def _table(dtype: torch.dtype) -> Tensor:
    return _new_table(dtype)


def _new_table(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float()
