"""The three products of an FP8 Linear: its output, and the gradients of its input and of its weight."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dtrain.precision.float8.cast import E4M3, Quantized
from dtrain.precision.float8.compiled import quantize, quantize_both
from dtrain.precision.float8.matmul import multiply
from dtrain.precision.float8.options import Recipe
from dtrain.precision.float8.weights import QuantizedWeight


def output_product(
    rows: Tensor, right: Quantized, num_columns: int, recipe: Recipe, *, keeps_input: bool
) -> tuple[Tensor, Quantized | None]:
    """Multiplies ``rows`` [M, K] by the operand of a weight [N, K].

    Returns:
        The product [M, N] in the recipe's dtype, and, if ``keeps_input``, the FP8 transpose of ``rows``, [K, M], which
        is the right operand of the weight gradient.
    """
    columns = None
    if keeps_input:
        left, columns = quantize_both(rows, E4M3, rowwise=recipe.rowwise, compiled=recipe.compile)
    else:
        left = quantize(rows, E4M3, rowwise=recipe.rowwise, compiled=recipe.compile)
    y = multiply(left, right, recipe.out_dtype, emulate=recipe.emulate, fast_accumulation=recipe.fast_accumulation)
    return y[:, :num_columns].contiguous(), columns


def gradient_products(
    rows: Tensor,
    quantized: QuantizedWeight,
    saved_weight: Sequence[Tensor],
    columns: Quantized | None,
    *,
    to_input: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of the input [M, K or more] and of the weight [N, K], each None if it is not needed.

    Args:
        rows: gradient of the output, [M, N].
        saved_weight: what ``QuantizedWeight.forward`` returned to be saved.
        columns: what ``output_product`` returned; None: the weight needs no gradient.
        to_input: whether the input needs one.
    """
    recipe = quantized.recipe
    rowwise, compiled = recipe.rowwise, recipe.compile
    if to_input:
        weight, factor = quantized.backward(*saved_weight)
    if to_input and columns is not None:
        left, transposed = quantize_both(rows, recipe.grad_dtype, rowwise=rowwise, compiled=compiled)
    elif to_input:
        scaled = rows if factor is None else rows * factor
        left = quantize(scaled, recipe.grad_dtype, rowwise=rowwise, compiled=compiled)
    else:
        transposed = quantize(rows.t(), recipe.grad_dtype, rowwise=rowwise, compiled=compiled)
    dx = dw = None
    if columns is not None:
        # never fast accumulation: gradients need all bits of the FP32 sums, see decision 0024
        dw = multiply(transposed, columns, recipe.out_dtype, emulate=recipe.emulate)
    if to_input:
        dx = multiply(left, weight, recipe.out_dtype, emulate=recipe.emulate)
    return dx, dw
