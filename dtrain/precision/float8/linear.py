"""``Float8Linear``: a Linear whose three matmuls (output, input gradient, weight gradient) are FP8."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dtrain.errors import ContractError, ModelError, UsageError
from dtrain.precision import autocast_ops
from dtrain.precision.float8.cast import E4M3, Quantized, quantize, quantize_both
from dtrain.precision.float8.matmul import multiply
from dtrain.precision.float8.options import Recipe
from dtrain.precision.float8.weights import QuantizedWeight
from dtrain.precision.regions import in_full_precision_region

_INPUTS = (torch.float32, torch.bfloat16, torch.float16)


class Float8Linear(nn.Linear):
    """A Linear whose matmuls are FP8 and whose bias is added in the output's dtype. :func:`convert` makes it.

    In a :func:`dtrain.full_precision` region it multiplies in FP32, with the dequantized weight. It also does so if
    code inside an engine's forward has switched autocast off. Compiled code calls it uncompiled.
    """

    recipe: Recipe
    quantized_weight: QuantizedWeight

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Weight [N, K] in the dtype of the parameter; gradients flow through it.

        If an engine stores the weight in FP8 only, this is a read-only dequantized copy: writes to it are lost, and
        hooks and ``requires_grad_`` raise :class:`dtrain.errors.UsageError`.
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
        y: Tensor = _Float8Matmul.apply(x, weight, self.recipe, quantized, torch.is_grad_enabled())
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
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight if keep_vars else self.weight.detach()

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


def convert(module: nn.Linear, recipe: Recipe, weight: QuantizedWeight | None = None) -> Float8Linear:
    """Converts ``module`` in place to compute in FP8, and returns it; its parameters and hooks stay.

    Args:
        module: a plain ``nn.Linear``. The forward of a subclass would be lost.
        weight: provides its weight; by default the parameter is cast in each forward and backward.
    """
    _leave_uncompiled()
    module.__class__ = Float8Linear
    assert isinstance(module, Float8Linear)
    module.recipe, module.quantized_weight = recipe, weight or QuantizedWeight(recipe)
    return module


@cache
def _leave_uncompiled() -> None:
    """Excludes ``Float8Linear.forward``, and all that it calls, from compilation.

    This is ``torch.compiler.disable`` without its import of dynamo, which takes a second.
    """
    forward: Any = Float8Linear.forward
    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(forward.__code__, eval_frame._FrameExecStrategy(skip, skip))
        forward._torchdynamo_disable = True  # against tracing from a caller; SKIP is against compiling it on a call
    except (ImportError, AttributeError, TypeError):  # private API, which another release may not have
        Float8Linear.forward = torch.compiler.disable(forward)  # type: ignore[method-assign]


class _Float8Matmul(torch.autograd.Function):
    """Saves the transposed FP8 input [K, M], the right operand of the weight gradient.

    Both gradients have the recipe's dtype; autograd casts them to the dtypes of input and parameter.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, recipe: Recipe, quantized: QuantizedWeight, grad_enabled: bool
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        right, saved_weight = quantized.forward(weight)
        saved_input: tuple[Tensor, ...] = ()
        if grad_enabled and ctx.needs_input_grad[1]:
            left, columns = quantize_both(rows, E4M3, rowwise=recipe.rowwise, compiled=recipe.compile)
            saved_input = (columns.values, columns.scale)
        else:
            left = quantize(rows, E4M3, rowwise=recipe.rowwise, compiled=recipe.compile)
        ctx.save_for_backward(*saved_input, *(saved_weight if ctx.needs_input_grad[0] else ()))
        ctx.recipe, ctx.quantized, ctx.x_shape, ctx.weight_shape = recipe, quantized, x.shape, weight.shape
        y = multiply(left, right, recipe.out_dtype, emulate=recipe.emulate, fast_accumulation=recipe.fast_accumulation)
        # not a view for autograd, so that it may be changed in place, as by nn.ReLU(inplace=True)
        shape = (*x.shape[:-1], weight.shape[0])
        output: Tensor = torch.ops.aten._unsafe_view(y[:, : weight.shape[0]].contiguous(), shape)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        recipe: Recipe = ctx.recipe
        saved = ctx.saved_tensors
        rows = grad.reshape(-1, ctx.weight_shape[0])
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        options = {"rowwise": recipe.rowwise, "compiled": recipe.compile}
        if needs_dx:
            weight, factor = ctx.quantized.backward(*(saved[2:] if needs_dw else saved))
        if needs_dx and needs_dw:
            left, columns = quantize_both(rows, recipe.grad_dtype, **options)
        elif needs_dx:
            left = quantize(rows if factor is None else rows * factor, recipe.grad_dtype, **options)
        else:
            columns = quantize(rows.t(), recipe.grad_dtype, **options)
        dx = dw = None
        if needs_dw:
            right = Quantized(saved[0], saved[1])
            # never fast accumulation: gradients need all bits of the FP32 sums, see decision 0024
            dw = multiply(columns, right, recipe.out_dtype, emulate=recipe.emulate)
        if needs_dx:
            dx = multiply(left, weight, recipe.out_dtype, emulate=recipe.emulate)
            dx = dx[:, : ctx.x_shape[-1]].reshape(ctx.x_shape)
        return dx, dw, None, None, None
