"""``Float8Linear``: a Linear whose three matmuls (output, input gradient, weight gradient) are FP8."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dtrain.errors import ContractError, ModelError, UsageError
from dtrain.precision import autocast_ops
from dtrain.precision.float8.cast import Quantized
from dtrain.precision.float8.operators import weight_gradient, weight_product
from dtrain.precision.float8.options import Recipe
from dtrain.precision.float8.products import gradient, operands, output
from dtrain.precision.float8.weights import QuantizedWeight
from dtrain.precision.regions import in_full_precision_region

_INPUTS = (torch.float32, torch.bfloat16, torch.float16)


class Float8Linear(nn.Linear):
    """A Linear whose matmuls are FP8 and whose bias is added in the output's dtype. ``convert`` makes it.

    In a ``dtrain.full_precision`` region it multiplies in FP32, with the dequantized weight. It also does so if
    code inside an engine's forward has switched autocast off. In compiled code its products are operators, and its
    casts ordinary operations.
    """

    quantized_weight: QuantizedWeight

    @property
    def recipe(self) -> Recipe:
        """The recipe of its three products."""
        return self.quantized_weight.recipe

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Weight [N, K] in the dtype of the parameter; gradients flow through it.

        If an engine stores the weight in FP8 only, this is a read-only dequantized copy: writes to it are lost, and
        hooks and ``requires_grad_`` raise ``dtrain.errors.UsageError``.
        """
        return self.quantized_weight.dequantized(self.weight_parameter)

    @property
    def weight_parameter(self) -> Tensor:
        """The parameter itself, which may stand for a weight that an engine stores in FP8 only."""
        weight = self._parameters["weight"]
        assert weight is not None
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``x`` [..., K] in FP32, BF16 or FP16 to [..., N] in the recipe's dtype.

        Raises:
            ModelError: ``x`` has another dtype or another last dimension.
            ContractError: an engine's forward calls it under autocast of another dtype than the recipe's.
        """
        if x.dtype not in _INPUTS or not x.dim() or x.shape[-1] != self.in_features:
            raise ModelError(
                f"an FP8 Linear takes FP32, BF16 or FP16 [..., {self.in_features}]; got {x.dtype} {list(x.shape)}; "
                f"cast the input, or keep the module out of FP8 by a rule"
            )
        if self.computes_in_fp32(x.device.type):
            return F.linear(x.float(), self.weight.float(), None if self.bias is None else self.bias.float())
        weight, quantized = self.weight_parameter, self.quantized_weight
        if are_products_in_bf16():
            dtype = self.recipe.out_dtype
            bias = None if self.bias is None else self.bias.to(dtype)
            return F.linear(x.to(dtype), quantized.represented(weight).to(dtype), bias)
        traced = torch.compiler.is_compiling()
        source = quantized.key if traced or _depths["operators"] else quantized
        y: Tensor = _Float8Matmul.apply(
            x, weight, source, quantized.recipe_key, torch.is_grad_enabled(), traced, *quantized.stored(weight)
        )
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def computes_in_fp32(self, device_type: str) -> bool:
        """Whether a forward called now multiplies in FP32."""
        if in_full_precision_region(device_type) or not autocast_ops.is_enabled():
            return in_full_precision_region(device_type)
        is_on = torch.is_autocast_enabled(device_type)
        dtype, out_dtype = torch.get_autocast_dtype(device_type) if is_on else torch.float32, self.recipe.out_dtype
        if dtype not in (torch.float32, out_dtype):
            raise ContractError(
                f"an FP8 Linear {list(self.weight_parameter.shape)} that gives {out_dtype} is called under autocast of "
                f"{dtype}; leave autocast to the engine, and give the module a rule if it is to run in another format "
                f"(precision.rules)"
            )
        return dtype != out_dtype

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, float8=({self.recipe.describe()})"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        own: dict[str, Any] = {}
        super()._save_to_state_dict(own, prefix, True)  # reads no values
        own |= dict.fromkeys(own.keys() & {f"{prefix}weight"}, self.weight)
        for key, value in own.items():
            destination[key] = value.detach() if isinstance(value, Tensor) and not keep_vars else value

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        weight = self._parameters.get("weight")  # `[...]` would unshard the weight under DeepSpeed
        quantized = self.quantized_weight
        if weight is not None and f"{prefix}weight" in state_dict and quantized.dequantized(weight) is not weight:
            raise UsageError(
                f"'{prefix}weight' is an FP8 replica, which the engine casts, so load_state_dict cannot write it; load "
                f"inside `with engine.modify_weights():`, or a checkpoint with engine.load"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Float8Linear:
        """Copies the module; the copy owns its weight and casts it in each forward."""
        weight = self._parameters.get("weight")  # `[...]` would unshard the weight under DeepSpeed
        assert weight is not None
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        if id(weight) not in memo:  # else the caller has its values
            values = self.quantized_weight.dequantized(weight).detach().clone()
            memo[id(weight)] = nn.Parameter(values, requires_grad=weight.requires_grad)
        copied.__dict__.update(copy.deepcopy(self.__dict__ | {"quantized_weight": QuantizedWeight(self.recipe)}, memo))
        return copied


_depths = {"operators": 0, "bf16": 0}  # of the regions below; global, because backward runs in threads of its own


@contextmanager
def _inside(way: str) -> Iterator[None]:
    _depths[way] += 1
    try:
        yield
    finally:
        _depths[way] -= 1


def products_as_operators() -> AbstractContextManager[None]:
    """Inside, FP8 Linears multiply by one operator each, so that a dispatch mode sees no cast that may be cached."""
    return _inside("operators")


def products_in_bf16() -> AbstractContextManager[None]:
    """Inside, FP8 Linears multiply in the recipe's output dtype, with the weight that its FP8 copy represents."""
    return _inside("bf16")


def are_products_in_bf16() -> bool:
    """Whether it is called inside ``products_in_bf16``."""
    return _depths["bf16"] > 0


def convert(module: nn.Linear, recipe: Recipe, weight: QuantizedWeight | None = None) -> Float8Linear:
    """Converts ``module`` in place to compute in FP8, and returns it; its parameters and hooks stay.

    Args:
        module: a plain ``nn.Linear``. The forward of a subclass would be lost.
        weight: provides its weight; by default the parameter is cast in each forward and backward.
    """
    module.__class__ = Float8Linear
    assert isinstance(module, Float8Linear)
    module.quantized_weight = weight or QuantizedWeight(recipe)
    return module


@torch.compiler.allow_in_graph  # its operations are in the graph of the compiler, which fuses the casts
class _Float8Matmul(torch.autograd.Function):
    """Saves the transposed input [K, M], the right operand of the weight gradient, in FP8 if that product is.

    Both gradients have the recipe's dtype; autograd casts them to the dtypes of input and parameter.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        source: QuantizedWeight | Tensor,
        recipe_key: str,
        grad_enabled: bool,
        traced: bool,
        *copies: Tensor,
    ) -> Tensor:
        """Multiplies.

        Args:
            source: what provides the weight, or its key; then the products are operators.
            recipe_key: ``QuantizedWeight.recipe_key``.
            grad_enabled: whether autograd records the call.
            traced: whether a compiler traces it.
            copies: ``QuantizedWeight.stored``.
        """
        recipe = Recipe.of_key(recipe_key)
        keeps_input = grad_enabled and ctx.needs_input_grad[1]
        rows = x.reshape(-1, x.shape[-1])
        left, columns = operands(rows, recipe, "fprop", left=True, columns=keeps_input, traced=traced)
        assert left is not None
        if isinstance(source, Tensor):
            of_output, saved_weight = copies[:2] or (weight,), (source, *(copies[2:] or (weight,)))
            y = weight_product(*left, weight.shape[0], recipe.out_dtype, source, of_output, False)
        else:
            of_output, saved_weight = source.tensors(weight)
            y = output(left, source.forward(*of_output), weight.shape[0], recipe)
        ctx.save_for_backward(*(columns or ()), *(saved_weight if ctx.needs_input_grad[0] else ()))
        ctx.quantized = None if isinstance(source, Tensor) else source
        ctx.recipe_key, ctx.traced, ctx.x_shape, ctx.w_shape = recipe_key, traced, x.shape, weight.shape
        # not a view for autograd, so that it may be changed in place, as by nn.ReLU(inplace=True)
        result: Tensor = torch.ops.aten._unsafe_view(y, (*x.shape[:-1], weight.shape[0]))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        recipe = Recipe.of_key(ctx.recipe_key)
        to_input, to_weight = ctx.needs_input_grad[:2]
        tensors, source = ctx.saved_tensors, ctx.quantized
        saved_input, weight = tensors[: 2 * to_weight], tensors[2 * to_weight :]
        if to_input and source is None:
            source, *weight = weight
        rows, num_inputs = grad.reshape(-1, grad.shape[-1]), ctx.w_shape[1]
        rows = rows * weight[2] if len(weight) == 3 else rows  # [Note: one copy]
        left, columns = operands(rows, recipe, "dgrad", left=to_input, columns=to_weight, traced=ctx.traced)
        dx = dw = None
        if columns is not None:
            if ctx.quantized is None and "wgrad" in recipe.products:
                dw = weight_gradient(*columns, *saved_input, num_inputs, ctx.recipe_key)
            else:
                dw = gradient(columns, Quantized(*saved_input), num_inputs, recipe)
        if left is not None:
            if isinstance(source, Tensor):
                dx = weight_product(*left, num_inputs, recipe.out_dtype, source, weight, True)
            else:
                dx = gradient(left, source.backward(*weight), num_inputs, recipe)
            dx = dx.reshape(ctx.x_shape)
        return dx, dw, *[None] * (len(ctx.needs_input_grad) - 2)
