"""FP8 products as operators, for code that ``torch.compile`` traces: padding, cached operands and kernels stay inside.

The weight of a Linear enters by its key, a 0-dim tensor that selects a ``QuantizedWeight``, so that equal blocks
share a graph. The stored copies that backward needs are arguments too: autograd saves them, and an engine may free them
in between and provide them again (stage 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dtrain.precision.float8.cast import E4M3, Quantized, dequantize
from dtrain.precision.float8.products import gradient_products, output_product
from dtrain.precision.float8.weights import QuantizedWeight


@torch.library.custom_op("dtrain::float8_linear", mutates_args=())
def float8_linear(
    rows: Tensor,
    weight: Tensor,
    key: Tensor,
    copies: Sequence[Tensor],
    out_dtype: torch.dtype,
    rowwise: bool,
    keeps_input: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ``rows`` [M, K] times the transpose of a weight [N, K], and the FP8 transpose of ``rows`` with its scale.

    Args:
        weight: the parameter, which may stand for a weight that is stored in FP8 only.
        key: ``QuantizedWeight.key``.
        copies: ``QuantizedWeight.stored``.
        out_dtype: of the recipe.
        rowwise: of the recipe.
        keeps_input: whether the transpose is needed; else it is empty.
    """
    quantized = QuantizedWeight.of_key(key)
    right = quantized.stored_operand(copies) if copies else quantized.forward(weight)[0]
    y, columns = output_product(rows, right, weight.shape[0], quantized.recipe, keeps_input=keeps_input)
    if columns is None:
        return y, rows.new_empty(0, dtype=E4M3), rows.new_empty(0, dtype=torch.float32)
    return y, columns.values, columns.scale


@float8_linear.register_fake
def _(
    rows: Tensor,
    weight: Tensor,
    key: Tensor,
    copies: Sequence[Tensor],
    out_dtype: torch.dtype,
    rowwise: bool,
    keeps_input: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, width = rows.shape
    columns = (width, num_rows) if keeps_input else (0,)
    scales = ((width,) if rowwise else ()) if keeps_input else (0,)
    return (
        rows.new_empty(num_rows, weight.shape[0], dtype=out_dtype),
        rows.new_empty(columns, dtype=E4M3),
        rows.new_empty(scales, dtype=torch.float32),
    )


@torch.library.custom_op("dtrain::float8_linear_backward", mutates_args=())
def float8_linear_backward(
    grad: Tensor,
    key: Tensor,
    saved_weight: Sequence[Tensor],
    columns: Sequence[Tensor],
    num_inputs: int,
    to_input: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the input [M, K] and of the weight [N, K]; one that is not needed is empty.

    Args:
        grad: gradient of the output, [M, N].
        saved_weight: what ``QuantizedWeight.backward`` takes, or the parameter alone, which is cast.
        columns: the FP8 transpose of the input, with its scale; empty: the weight needs no gradient.
        num_inputs: K.
        to_input: whether the input needs a gradient.
    """
    kept = Quantized(*columns) if columns else None
    quantized = QuantizedWeight.of_key(key)
    if len(saved_weight) == 1:
        saved_weight = quantized.saved(saved_weight[0])
    dx, dw = gradient_products(grad, quantized, saved_weight, kept, to_input=to_input)
    none = grad.new_empty(0, dtype=out_dtype)
    return none if dx is None else dx[:, :num_inputs].contiguous(), none.clone() if dw is None else dw.contiguous()


@float8_linear_backward.register_fake
def _(
    grad: Tensor,
    key: Tensor,
    saved_weight: Sequence[Tensor],
    columns: Sequence[Tensor],
    num_inputs: int,
    to_input: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    num_rows, num_outputs = grad.shape
    dx = (num_rows, num_inputs) if to_input else (0,)
    dw = (num_outputs, num_inputs) if columns else (0,)
    return grad.new_empty(dx, dtype=out_dtype), grad.new_empty(dw, dtype=out_dtype)


@torch.library.custom_op("dtrain::float8_dequantize", mutates_args=())
def float8_dequantize(weight: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """Returns the weight [N, K] that FP8 ``values`` and their scale represent, in the dtype of its parameter."""
    return dequantize(Quantized(values, scale)).to(weight.dtype)


@float8_dequantize.register_fake
def _(weight: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    return weight.new_empty(weight.shape)


float8_dequantize.register_autograd(lambda ctx, grad: (grad, None, None))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    rows, weight, key, copies, ctx.out_dtype, _, keeps_input = inputs
    _, *columns = output
    ctx.num_columns = len(columns) if keeps_input else 0
    ctx.num_inputs, ctx.num_copies = rows.shape[1], len(copies)
    saved_weight = (copies[2:] if copies else [weight]) if ctx.needs_input_grad[0] else []
    ctx.save_for_backward(key, *columns[: ctx.num_columns], *saved_weight)
    ctx.mark_non_differentiable(*columns)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    others = None, [None] * ctx.num_copies, None, None, None
    if grad is None:
        return None, None, *others
    key, *saved = ctx.saved_tensors
    columns, saved_weight = saved[: ctx.num_columns], saved[ctx.num_columns :]
    to_input, to_weight = ctx.needs_input_grad[:2]
    dx, dw = torch.ops.dtrain.float8_linear_backward(
        grad, key, saved_weight, columns if to_weight else [], ctx.num_inputs, to_input, ctx.out_dtype
    )
    return dx if to_input else None, dw if to_weight else None, *others


float8_linear.register_autograd(_backward, setup_context=_save)
