"""Products of FP8 matrices: ``torch._scaled_mm``, or the same in FP32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.precision.float8.cast import Quantized, decode

ALIGNMENT = 16
"""What the dimensions of a product must be multiples of on Tensor Cores."""


def multiply(
    left: Quantized, right: Quantized, out_dtype: torch.dtype, *, emulate: bool, fast_accumulation: bool = False
) -> Tensor:
    """``left`` [M, K] times the transpose of ``right`` [N, K]: [M, N] in ``out_dtype``; both row-major.

    Both have one scale, or each row of both has its own. Dimensions that Tensor Cores refuse are padded with zeros.

    Args:
        left: E4M3 or E5M2.
        right: E4M3; its values may be an :func:`operand` already.
        out_dtype: that the FP32 sums are rounded to.
        emulate: multiply in FP32. On a CPU these are the bits of ``torch._scaled_mm``, but for fewer than 12 rows,
            which that sums in another order.
        fast_accumulation: let Hopper sum in fewer bits than FP32 has; an emulation does not imitate that.
    """
    num_columns = right.values.shape[0]
    if not left.values.numel():
        return torch.zeros(left.values.shape[0], num_columns, dtype=out_dtype, device=left.values.device)
    values = right.values if right.values.dtype == torch.float32 else operand(right.values, emulate=emulate)
    scales = (left.scale, right.scale)
    if left.scale.dim():
        column_scales = F.pad(right.scale, (0, values.shape[0] - right.scale.shape[0]), value=1.0)
        scales = (left.scale.unsqueeze(1), column_scales.unsqueeze(0))
    padded = _padded(left.values, left.values.shape[0], values.shape[1])
    # autocast would sum in BF16, inside torch._scaled_mm on a CPU too
    with torch.autocast(padded.device.type, enabled=False):
        if emulate:
            product = _emulated(padded, values, scales, out_dtype)
        else:
            product = torch._scaled_mm(
                padded,
                values.t(),
                scale_a=scales[0],
                scale_b=scales[1],
                out_dtype=out_dtype,
                use_fast_accum=fast_accumulation,
            )
    return product[:, :num_columns]


def operand(values: Tensor, *, emulate: bool, transposed: bool = False) -> Tensor:
    """FP8 ``values`` [N, K] as the right side of a product needs them; ``transposed``: as [K, N].

    Padded with zeros to multiples of 16; in FP8 and row-major, or in FP32 for an emulation. ``values`` themselves where
    there is nothing to do.
    """
    rows, columns = (size + -size % ALIGNMENT for size in values.shape)
    padded = _padded(values, rows, columns)
    if emulate:
        decoded = decode(padded)
        return decoded.t() if transposed else decoded
    return padded.t().contiguous() if transposed else padded


def _padded(values: Tensor, rows: int, columns: int) -> Tensor:
    pad = (0, columns - values.shape[1], 0, rows - values.shape[0])
    return F.pad(values.view(torch.uint8), pad).view(values.dtype) if any(pad) else values  # torch would copy


def _emulated(left: Tensor, right: Tensor, scales: tuple[Tensor, Tensor], out_dtype: torch.dtype) -> Tensor:
    """Products of FP8 numbers are exact in FP32, and so is a power of two: only the sums round, as they do there."""
    # a buffer of our own: what `@` gives, selective activation checkpointing may keep, and it must not change then
    product = torch.empty(left.shape[0], right.shape[0], dtype=torch.float32, device=left.device)
    torch.mm(decode(left), right.t(), out=product)
    # one scale after the other: their product may be out of FP32's range
    return product.mul_(scales[0]).mul_(scales[1]).to(out_dtype)
