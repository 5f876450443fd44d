"""Rounds FP32 tensors to a format as a cast would, and measures what that loses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtrain.precision.float8.cast import E4M3, E5M2, cast, scale_of
from dtrain.precision.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, TF32, FloatFormat

_FLOAT8 = {FP8_E4M3: E4M3, FP8_E5M2: E5M2}
_SIXTEEN = {BF16: torch.bfloat16, FP16: torch.float16}


def rounded(x: Tensor, floats: FloatFormat, scale: Tensor | float | None = None) -> Tensor:
    """Returns ``x`` rounded to ``floats``, in FP32.

    Args:
        x: any floating dtype and shape.
        floats: ``fp32``, ``tf32``, ``bf16``, ``fp16``, or one of the FP8 formats, which saturate.
        scale: what values are divided by before the cast and multiplied by after it, broadcastable to ``x``; FP8
            only. None: the power of two that fits the largest magnitude of ``x``, as the engines choose it.
    """
    x = x.float()
    if floats is FP32:
        return x
    if floats is TF32:
        return round_mantissa(x, TF32.mantissa_bits)
    if floats in _SIXTEEN:
        return x.to(_SIXTEEN[floats]).float()
    dtype = _FLOAT8[floats]
    if scale is None:
        scale = scale_of(x.abs().amax() if x.numel() else x.new_zeros(()), dtype)
    scale = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    return cast(x, scale, dtype).float() * scale


def round_mantissa(x: Tensor, mantissa_bits: int) -> Tensor:
    """Returns FP32 ``x`` rounded to fewer mantissa bits, ties to even, in FP32's range: what precision alone loses."""
    dropped = FP32.mantissa_bits - mantissa_bits
    if not dropped:
        return x
    bits = x.view(torch.int32)
    is_odd = (bits >> dropped) & 1
    near = (bits + ((1 << dropped - 1) - 1) + is_odd) & -(1 << dropped)
    return torch.where(x.isfinite(), near.view(torch.float32), x)


@dataclass(frozen=True)
class Loss:
    """Errors, underflows and overflows from rounding a tensor.

    Attributes:
        numel: number of elements.
        underflows: finite nonzero elements that became zero.
        saturated: finite elements that became Inf, or a saturating format's largest number although they were larger.
        signal: sum of the squares of the finite elements.
        noise: sum of the squares of their errors, without those of elements that became Inf.
    """

    numel: int
    underflows: int
    saturated: int
    signal: float
    noise: float

    @property
    def sqnr_db(self) -> float:
        """Signal-to-quantization-noise ratio in decibels; infinite without any error."""
        if self.noise == 0.0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf

    def __add__(self, other: Loss) -> Loss:
        return Loss(
            self.numel + other.numel,
            self.underflows + other.underflows,
            self.saturated + other.saturated,
            self.signal + other.signal,
            self.noise + other.noise,
        )


def measure_loss(x: Tensor, quantized: Tensor, *, largest: float | Tensor = math.inf) -> Loss:
    """Compares ``x`` with ``quantized``, its rounded values in FP32; reads the device.

    Args:
        largest: the largest number of the format times its scale: larger elements are saturated.
    """
    return loss_of_sums(loss_sums(x, quantized, largest=largest).tolist())


def loss_sums(x: Tensor, quantized: Tensor, *, largest: float | Tensor = math.inf) -> Tensor:
    """Returns the fields of a ``Loss`` as FP64 [5] on the device, which may be added up; as ``measure_loss``.

    Counts are exact up to 2^53.
    """
    x = x.float()
    finite = x.isfinite()
    lost = finite & ~quantized.isfinite()
    error = torch.where(finite & ~lost, quantized - x, 0.0)
    fields = (
        x.new_full((), x.numel(), dtype=torch.float64),
        ((quantized == 0) & (x != 0) & finite).sum(),
        (lost | (finite & (x.abs() > largest))).sum(),
        # a norm in FP64 makes no FP64 copy
        torch.linalg.vector_norm(torch.where(finite, x, 0.0), dtype=torch.float64).square(),
        torch.linalg.vector_norm(error, dtype=torch.float64).square(),
    )
    return torch.stack([field.double() for field in fields])


def loss_of_sums(values: Sequence[float]) -> Loss:
    """Returns the record of ``loss_sums``, read on the host."""
    numel, underflows, saturated, signal, noise = values
    return Loss(int(numel), int(underflows), int(saturated), signal, noise)
