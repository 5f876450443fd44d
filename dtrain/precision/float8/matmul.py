"""Matmuls of FP8 matrices: ``torch.nn.functional.scaled_mm``, or its emulation in FP32.

[Note: rules of scaled_mm] PyTorch checks these on a GPU, in aten/src/ATen/native/cuda/ScaledBlas.cpp and
RowwiseScaledMM.cu, and they are met here so:

- Compute capability 8.9 or later; 9.0 alone for blocks. The left operand is row-major, the right one column-major: the
  transpose of a row-major [N, K]. Capability 10.0 takes other layouts of tensorwise products too, 8.9 and 9.0 do not.
- K and N are multiples of 16, and so is every row's address; M is any number, in blocks a multiple of 4 (cuBLAS).
  PyTorch's rules for meta tensors want multiples of 128 of K and N in blocks. ``operand`` pads N and K, and
  ``multiply`` pads the left side.
- One operand may be E5M2, not both. Row by row only the left one may, and PyTorch's own tests have E4M3 alone there.
  In blocks both are E4M3.
- Scales are FP32 on the same GPU. Tensorwise: one element, of any shape, so 0-dim too. Rowwise: [M, 1] and [1, N],
  contiguous, both or neither. Lines of 128: [M, K / 128] and [N, K / 128], both with the first stride 1. Squares of
  128, on one side alone: [K / 128, N / 128] with the first stride 1, K / 128 padded to a multiple of 4. Kernels may
  read scales in vectors, so tables of scales keep each weight's on 16 bytes.
- Tensorwise products run in cuBLASLt, and blocks from its version 12.9 on. Rowwise ones run there on 9.0 with CUDA 12.9
  or later, else in CUTLASS, which PyTorch 2.11 builds without FP32 output. Products are BF16 here, which all have.
- ``use_fast_accum`` changes sums on 8.9 and 9.0, and is refused in blocks. A bias is refused with FP32 output, and
  Float8Linear adds its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.errors import ConfigError
from dtrain.precision.fake import is_fake
from dtrain.precision.float8.cast import BLOCK, Quantized, decode, dequantize

ALIGNMENT = 16
"""Tensor Cores need matmul dimensions that are multiples of this."""


def multiply(
    left: Quantized, right: Quantized, out_dtype: torch.dtype, *, emulate: bool, fast_accumulation: bool = False
) -> Tensor:
    """Multiplies ``left`` [M, K] by the transpose of ``right`` [N, K] and returns [M, N] in ``out_dtype``.

    Both are row-major. Both have one scale, or one scale per row, or ``left`` has a scale for each 128 elements of a
    row and ``right`` for those, or for each 128 x 128. Dimensions that Tensor Cores do not support are padded with
    zeros. If ``left`` is not FP8, the product is one in ``out_dtype``, with the numbers that ``right`` represents.

    Args:
        left: E4M3 or E5M2; or another dtype, without a scale.
        right: E4M3, whose values may already be an ``operand``; if ``left`` is not FP8, any dtype.
        out_dtype: dtype that the FP32 sums are rounded to.
        emulate: multiply in FP32. On a CPU this gives the bits of ``scaled_mm``, except for fewer than 16 rows, which
            that function sums in another order. In blocks FP32 sums of 128 products are scaled and added in order.
        fast_accumulation: let Hopper accumulate in fewer bits than FP32 has. The emulation does not imitate this.

    Raises:
        ConfigError: blocks on a CPU without ``emulate``.
    """
    num_columns = right.values.shape[0]
    if not left.values.numel():
        return torch.zeros(left.values.shape[0], num_columns, dtype=out_dtype, device=left.values.device)
    device_type = left.values.device.type
    if left.values.itemsize > 1:
        with torch.autocast(device_type, enabled=False):
            other = dequantize(right) if right.values.itemsize == 1 else right.values
            return left.values.to(out_dtype) @ other.to(out_dtype).t()
    in_blocks = left.scale.dim() == 2
    values = right.values
    if values.dtype != torch.float32:
        values = operand(values, emulate=emulate, alignment=BLOCK if in_blocks else ALIGNMENT)
    num_rows = left.values.shape[0]
    padded = _padded(left.values, num_rows + (-num_rows % ALIGNMENT if in_blocks else 0), values.shape[1])
    # under autocast the sums would be BF16, also inside scaled_mm on a CPU
    with torch.autocast(device_type, enabled=False):
        if emulate:
            product = _emulated(padded, values, left.scale, right.scale, out_dtype)
        elif in_blocks and device_type == "cpu" and not is_fake(padded):  # on which a plan for a GPU runs
            raise ConfigError("float8 recipe=blockwise has no products on CPUs but emulated ones; use emulate=auto")
        else:
            scaled_mm: Any = F.scaled_mm
            scales = _given(left.scale, right.scale, len(padded), len(values))
            product = scaled_mm(padded, values.t(), *scales, output_dtype=out_dtype, use_fast_accum=fast_accumulation)
    return product[:num_rows, :num_columns]


def operand(values: Tensor, *, emulate: bool, transposed: bool = False, alignment: int = ALIGNMENT) -> Tensor:
    """Prepares FP8 ``values`` [N, K] as the right operand of a matmul; ``transposed`` as [K, N].

    The result is padded with zeros to multiples of ``alignment``. It is FP8 and row-major, or FP32 if ``emulate``.
    Returns ``values`` themselves if they need no change.
    """
    rows, columns = (size + -size % alignment for size in values.shape)
    padded = _padded(values, rows, columns)
    made = decode(padded) if emulate else padded
    return made.t().contiguous() if transposed else made


def _padded(values: Tensor, rows: int, columns: int) -> Tensor:
    pad = (0, columns - values.shape[1], 0, rows - values.shape[0])
    return F.pad(values.view(torch.uint8), pad).view(values.dtype) if any(pad) else values  # F.pad copies even by 0


def _given(own: Tensor, other: Tensor, num_rows: int, num_columns: int) -> tuple[Any, ...]:
    """Returns the scales of [num_rows, K] and of [num_columns, K], each with its kind, as ``scaled_mm`` takes them."""
    kinds: Any = F.ScalingType
    if not own.dim():
        return own, kinds.TensorWise, other, kinds.TensorWise
    if own.dim() == 1:
        return own.unsqueeze(1), kinds.RowWise, _filled(other, num_columns).unsqueeze(0), kinds.RowWise
    own = _by_line(own, num_rows)
    if _is_of_squares(other, num_columns):
        across = other.shape[1]
        return own, kinds.BlockWise1x128, _by_line(other.t(), across + -across % 4), kinds.BlockWise128x128
    return own, kinds.BlockWise1x128, _by_line(other, num_columns), kinds.BlockWise1x128


def _is_of_squares(scale: Tensor, num_rows: int) -> bool:
    return len(scale) == -(-num_rows // BLOCK)


def _by_line(scale: Tensor, num_rows: int) -> Tensor:
    """Returns ``scale`` [rows, n] with its first stride 1, with ones for rows up to ``num_rows``."""
    return F.pad(scale.t(), (0, num_rows - len(scale)), value=1.0).contiguous().t()


def _filled(scale: Tensor, num_rows: int) -> Tensor:
    return F.pad(scale, (0, 0) * (scale.dim() - 1) + (0, num_rows - len(scale)), value=1.0)


def _emulated(left: Tensor, right: Tensor, own: Tensor, other: Tensor, out_dtype: torch.dtype) -> Tensor:
    # only the sums round, as in scaled_mm: products of FP8 numbers and powers of two are exact in FP32.
    # `out=`, because selective activation checkpointing may keep the result of `@`, which is scaled in place below
    product = torch.empty(left.shape[0], right.shape[0], dtype=torch.float32, device=left.device)
    decoded = decode(left)
    if own.dim() < 2:
        torch.mm(decoded, right.t(), out=product)
        # one scale at a time: their product may leave the range of FP32
        own, other = (own.unsqueeze(1), _filled(other, len(right))) if own.dim() else (own, other)
        return product.mul_(own).mul_(other).to(out_dtype)
    total = torch.zeros_like(product)
    if _is_of_squares(other, len(right)):
        other = other.repeat_interleave(BLOCK, dim=0)[: len(right)]
    own, other = _filled(own, len(left)), _filled(other, len(right))
    for number in range(own.shape[1]):
        part = slice(number * BLOCK, (number + 1) * BLOCK)
        torch.mm(decoded[:, part], right[:, part].t(), out=product)
        total += product.mul_(own[:, number, None]).mul_(other[:, number])
    return total.to(out_dtype)
