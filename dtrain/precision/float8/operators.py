"""FP8 products as operators, for code that ``torch.compile`` traces: padding, cached operands and kernels stay inside.

The weight of a Linear enters by its key, a 0-dim tensor that selects a ``QuantizedWeight``, so that equal blocks
share a graph. The stored copies that backward needs are arguments too: autograd saves them, and an engine may free them
in between and provide them again (stage 3). Inputs and gradients enter cast: the compiler sees the casts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from dtrain.precision.float8.cast import BLOCK, Quantized, Scaling, dequantize
from dtrain.precision.float8.options import Recipe
from dtrain.precision.float8.products import gradient, output
from dtrain.precision.float8.proof import quantize
from dtrain.precision.float8.weights import QuantizedWeight


# the layout is flexible, because Inductor would copy the cast for each product of one input
@torch.library.custom_op("dtrain::float8_weight_product", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def weight_product(
    left: Tensor, scale: Tensor, width: int, out_dtype: torch.dtype, key: Tensor, weight: Sequence[Tensor], dgrad: bool
) -> Tensor:
    """Returns the product of ``left`` [M, n] and a weight: the output [M, N], or the input's gradient [M, K].

    Args:
        left, scale: the cast input or gradient of the output.
        width: N or K.
        out_dtype: of the recipe.
        key: ``QuantizedWeight.key``.
        weight: what ``QuantizedWeight.forward`` or, for the gradient, ``backward`` takes; or the parameter alone.
        dgrad: whether the product is the gradient.
    """
    quantized, cast = QuantizedWeight.of_key(key), Quantized(left.contiguous(), scale)
    given = weight if len(weight) > 1 else quantized.tensors(weight[0])[dgrad]
    if dgrad:
        return gradient(cast, quantized.backward(*given), width, quantized.recipe).contiguous()
    return output(cast, quantized.forward(*given), width, quantized.recipe)


@weight_product.register_fake
def _(left: Tensor, scale: Tensor, width: int, out_dtype: torch.dtype, *_: object) -> Tensor:
    return left.new_empty(left.shape[0], width, dtype=out_dtype)


@torch.library.custom_op("dtrain::float8_weight_gradient", mutates_args=())
def weight_gradient(
    grad: Tensor, scale: Tensor, columns: Tensor, columns_scale: Tensor, num_columns: int, recipe_key: str
) -> Tensor:
    """Returns the gradient of a weight [N, K]: the cast ``grad`` [N, M] times the transpose of ``columns`` [K, M]."""
    left, right = Quantized(grad, scale), Quantized(columns, columns_scale)
    return gradient(left, right, num_columns, Recipe.of_key(recipe_key)).contiguous()


@weight_gradient.register_fake
def _(grad: Tensor, scale: Tensor, columns: Tensor, columns_scale: Tensor, num_columns: int, recipe_key: str) -> Tensor:
    return grad.new_empty(grad.shape[0], num_columns, dtype=Recipe.of_key(recipe_key).out_dtype)


@torch.library.custom_op("dtrain::float8_quantize", mutates_args=())
def quantize_in_blocks(rows: Tensor, dtype: torch.dtype, both: bool, compiled: bool) -> list[Tensor]:
    """Returns values and scales of lines of 128 of ``rows`` [M, n], and with ``both`` those of the transpose.

    Opaque, because one kernel reads a block once for both, which a compiler does not find: it needs more bytes.
    """
    return list(chain(*quantize(rows, dtype, Scaling.LINES, both=both, compiled=compiled)))


@quantize_in_blocks.register_fake
def _(rows: Tensor, dtype: torch.dtype, both: bool, compiled: bool) -> list[Tensor]:
    found = []
    for height, width in (tuple(rows.shape), tuple(rows.shape[::-1]))[: 1 + both]:
        across = -(-width // BLOCK)
        found += [rows.new_empty(height, width, dtype=dtype), rows.new_empty(across, height, dtype=torch.float32).t()]
    return found


@torch.library.custom_op("dtrain::float8_dequantize", mutates_args=())
def float8_dequantize(weight: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """Returns the weight [N, K] that FP8 ``values`` and their scale represent, in the dtype of its parameter."""
    return dequantize(Quantized(values, scale)).to(weight.dtype)


@float8_dequantize.register_fake
def _(weight: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    return weight.new_empty(weight.shape)


float8_dequantize.register_autograd(lambda ctx, grad: (grad, None, None))
