"""The three products of an FP8 Linear: its output, and the gradients of its input and of its weight.

The casts stand apart from the products, so that a compiler sees them: as ordinary operations before an opaque product
they become part of the kernels that make what is cast, such as a norm's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dtrain.precision.float8.cast import E4M3, Quantized
from dtrain.precision.float8.matmul import multiply
from dtrain.precision.float8.options import Recipe
from dtrain.precision.float8.proof import quantize


def operands(
    rows: Tensor, recipe: Recipe, product: str, *, left: bool, columns: bool, traced: bool
) -> tuple[Quantized | None, Quantized | None]:
    """Casts ``rows`` [M, n] for ``product``, and their transpose [n, M] for the weight gradient, in one read.

    An operand of a product that is not FP8 is in the recipe's dtype, and has an empty scale.

    Args:
        product: fprop, of an input, or dgrad, of the output's gradient.
        left: whether the product's left operand is wanted.
        columns: whether the weight gradient's operand is.
        traced: whether a compiler traces the casts.
    """
    of_left, of_columns = left and product in recipe.products, columns and "wgrad" in recipe.products
    found: list[Quantized] = []
    if of_left or of_columns:
        x, both = rows if of_left else rows.t(), of_left and of_columns
        dtype = E4M3 if product == "fprop" else recipe.grad_dtype
        found = quantize(x, dtype, recipe.scaling, both=both, compiled=recipe.compile, traced=traced)

    def plain(x: Tensor) -> Quantized:
        return Quantized(x.to(recipe.out_dtype), x.new_empty(0, dtype=torch.float32))

    return (
        (found[0] if of_left else plain(rows)) if left else None,
        (found[-1] if of_columns else plain(rows.t())) if columns else None,
    )


def output(left: Quantized, right: Quantized, num_columns: int, recipe: Recipe) -> Tensor:
    """Returns the product [M, N] of an input [M, K] and the operand of a weight [N, K], in the recipe's dtype."""
    how = {"emulate": recipe.emulate, "fast_accumulation": recipe.fast_accumulation}
    return multiply(left, right, recipe.out_dtype, **how)[:, :num_columns].contiguous()


def gradient(left: Quantized, right: Quantized, num_columns: int, recipe: Recipe) -> Tensor:
    """Returns the gradient of an input or of a weight, [rows of ``left``, num_columns], in the recipe's dtype."""
    # never fast accumulation: gradients need all bits of the FP32 sums, see decision 0024
    return multiply(left, right, recipe.out_dtype, emulate=recipe.emulate)[:, :num_columns]
