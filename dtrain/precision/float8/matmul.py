"""Matmuls of FP8 matrices: ``torch._scaled_mm``, or its emulation in FP32.

[Note: rules of _scaled_mm] PyTorch since 2.11 checks these on a GPU, in aten/src/ATen/native/cuda (ScaledBlas.cpp:
``_scaled_mm_out_cuda`` and ``get_joint_scaling``; RowwiseScaledMM.cu: ``check_inputs``), and they are met here so:

- Compute capability 8.9 or later. The left operand is row-major, the right one column-major: the transpose of a
  row-major [N, K]. Capability 10.0 takes other layouts of tensorwise products too, 8.9 and 9.0 do not.
- K and N are multiples of 16, and so is every row's address; M is any number. ``operand`` pads N and K, and
  ``multiply`` pads K on the left.
- One operand may be E5M2, not both. Row by row only the left one may, and PyTorch's own tests have E4M3 alone there.
- Scales are FP32 on the same GPU. Tensorwise: one element, of any shape, so 0-dim too. Rowwise: [M, 1] and [1, N],
  contiguous, both or neither. Kernels may read scales of rows in vectors, so tables of scales keep each weight's on 16
  bytes.
- Tensorwise products run in cuBLASLt. Rowwise ones run there on 9.0 with CUDA 12.9 or later, else in CUTLASS, which
  PyTorch 2.11 builds without FP32 output. Products are BF16 here, which all of them have.
- ``use_fast_accum`` changes sums on 8.9 and 9.0. A bias is refused with FP32 output, and Float8Linear adds its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.precision.float8.cast import Quantized, decode

ALIGNMENT = 16
"""Tensor Cores need matmul dimensions that are multiples of this."""


def multiply(
    left: Quantized, right: Quantized, out_dtype: torch.dtype, *, emulate: bool, fast_accumulation: bool = False
) -> Tensor:
    """Multiplies ``left`` [M, K] by the transpose of ``right`` [N, K] and returns [M, N] in ``out_dtype``.

    Both are row-major, and both have one scale or one scale per row. Dimensions that Tensor Cores do not support are
    padded with zeros.

    Args:
        left: E4M3 or E5M2.
        right: E4M3; its values may already be an ``operand``.
        out_dtype: dtype that the FP32 sums are rounded to.
        emulate: multiply in FP32. On a CPU this gives the bits of ``torch._scaled_mm``, except for fewer than 16 rows,
            which that function sums in another order.
        fast_accumulation: let Hopper accumulate in fewer bits than FP32 has. The emulation does not imitate this.
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
    # under autocast the sums would be BF16, also inside torch._scaled_mm on a CPU
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
    """Prepares FP8 ``values`` [N, K] as the right operand of a matmul; ``transposed`` as [K, N].

    The result is padded with zeros to multiples of 16. It is FP8 and row-major, or FP32 if ``emulate``. Returns
    ``values`` themselves if they need no change.
    """
    rows, columns = (size + -size % ALIGNMENT for size in values.shape)
    padded = _padded(values, rows, columns)
    if emulate:
        decoded = decode(padded)
        return decoded.t() if transposed else decoded
    return padded.t().contiguous() if transposed else padded


def _padded(values: Tensor, rows: int, columns: int) -> Tensor:
    pad = (0, columns - values.shape[1], 0, rows - values.shape[0])
    return F.pad(values.view(torch.uint8), pad).view(values.dtype) if any(pad) else values  # F.pad copies even by 0


def _emulated(left: Tensor, right: Tensor, scales: tuple[Tensor, Tensor], out_dtype: torch.dtype) -> Tensor:
    # only the sums round, as in torch._scaled_mm: products of FP8 numbers and powers of two are exact in FP32.
    # `out=`, because selective activation checkpointing may keep the result of `@`, which is scaled in place below
    product = torch.empty(left.shape[0], right.shape[0], dtype=torch.float32, device=left.device)
    torch.mm(decode(left), right.t(), out=product)
    # one scale at a time: their product may leave the range of FP32
    return product.mul_(scales[0]).mul_(scales[1]).to(out_dtype)
