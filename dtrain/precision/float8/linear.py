"""``Float8Linear``: a Linear whose three products - output, input gradient, weight gradient - are FP8."""

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
from dtrain.precision.float8.weights import LocalWeights, WeightSource
from dtrain.precision.regions import is_exempt

_INPUTS = (torch.float32, torch.bfloat16, torch.float16)


class Float8Linear(nn.Linear):
    """A Linear whose products are FP8, its bias added in the output's dtype. Made by :func:`convert`.

    In a :func:`dtrain.full_precision` region it multiplies in FP32, with the weight that FP8 has left of it; so it does
    where code inside an engine's forward has switched autocast off. Compiled code calls it as it is.
    """

    recipe: Recipe
    source: WeightSource

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """[N, K] in the dtype of the parameter; gradients flow through it.

        Where the parameter holds no numbers it is dequantized, for reading alone: writes to it are lost, hooks and
        ``requires_grad_`` raise :class:`dtrain.errors.UsageError`.
        """
        return self.source.dequantized(self._parameter)

    @property
    def _parameter(self) -> Tensor:
        weight = self._parameters["weight"]
        assert weight is not None
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., K] in FP32, BF16 or FP16, to [..., N] in the recipe's dtype.

        Raises:
            ModelError: another dtype or another last dimension.
            ContractError: in an engine's forward, under autocast of another dtype than the recipe's.
        """
        if x.dtype not in _INPUTS or not x.dim() or x.shape[-1] != self.in_features:
            raise ModelError(
                f"an FP8 Linear takes FP32, BF16 or FP16 [..., {self.in_features}]; got {x.dtype} {list(x.shape)}; "
                f"cast the input, or keep the module out of FP8 by a rule"
            )
        if self._is_exempt(x.device.type):
            return F.linear(x.float(), self.weight.float(), None if self.bias is None else self.bias.float())
        y: Tensor = _Product.apply(x, self._parameter, self.recipe, self.source, torch.is_grad_enabled())
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _is_exempt(self, device_type: str) -> bool:
        if is_exempt(device_type) or not autocast_ops.is_enabled():
            return is_exempt(device_type)
        is_on = torch.is_autocast_enabled(device_type)
        dtype, out_dtype = torch.get_autocast_dtype(device_type) if is_on else torch.float32, self.recipe.out_dtype
        if dtype not in (torch.float32, out_dtype):
            raise ContractError(
                f"an FP8 Linear {list(self._parameter.shape)} that gives {out_dtype} is called under autocast of "
                f"{dtype}; leave autocast to the engine, and give the module a rule if it is to run in another format "
                f"(precision.rules)"
            )
        return dtype != out_dtype

    def extra_repr(self) -> str:
        """With the recipe."""
        return f"{super().extra_repr()}, float8=({self.recipe.describe()})"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight if keep_vars else self.weight.detach()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        weight = self._parameters.get("weight")  # where weights are sharded, an index would ask for them
        if weight is not None and f"{prefix}weight" in state_dict and self.source.dequantized(weight) is not weight:
            raise UsageError(
                f"'{prefix}weight' is an FP8 replica, which follows its FP32 master, so load_state_dict cannot write "
                f"it; load weights before dtrain.initialize, or a checkpoint with engine.load"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Float8Linear:
        """A copy owns its weight, and casts it itself."""
        weight = self._parameters.get("weight")  # where weights are sharded, an index would ask for them
        assert weight is not None
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        values = self.source.dequantized(weight).detach().clone()
        memo[id(weight)] = nn.Parameter(values, requires_grad=weight.requires_grad)
        copied.__dict__.update(copy.deepcopy(self.__dict__ | {"source": LocalWeights(self.recipe)}, memo))
        return copied


def convert(module: nn.Linear, recipe: Recipe, source: WeightSource | None = None) -> Float8Linear:
    """``module`` itself, which computes in FP8 from now on; its parameters, hooks and name stay.

    Args:
        module: not a subclass of ``nn.Linear``, whose own forward would be lost.
        recipe: of its products.
        source: of its weight; by default the parameter, cast in each forward.
    """
    _leave_uncompiled()
    module.__class__ = Float8Linear
    assert isinstance(module, Float8Linear)
    module.recipe, module.source = recipe, source or LocalWeights(recipe)
    return module


@cache
def _leave_uncompiled() -> None:
    """Has compiled callers call ``Float8Linear.forward`` as it is, and all that it calls.

    As ``torch.compiler.disable``, without its import of dynamo, which takes a second.
    """
    forward: Any = Float8Linear.forward
    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(forward.__code__, eval_frame._FrameExecStrategy(skip, skip))
        forward._torchdynamo_disable = True  # not to be traced into; the line before: not to be compiled when called
    except (ImportError, AttributeError, TypeError):  # private, so another release may lack it
        Float8Linear.forward = torch.compiler.disable(forward)  # type: ignore[method-assign]


class _Product(torch.autograd.Function):
    """What is saved of the input is its transpose in FP8, [K, M]: the right operand of the weight gradient.

    Both gradients have the recipe's dtype; autograd casts them to that of the input and of the parameter.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Recipe, source: WeightSource, records: bool) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        right, of_weight = source.forward(weight)
        of_input: tuple[Tensor, ...] = ()
        if records and ctx.needs_input_grad[1]:
            left, columns = quantize_both(rows, E4M3, rowwise=recipe.rowwise, compiled=recipe.compile)
            of_input = (columns.values, columns.scale)
        else:
            left = quantize(rows, E4M3, rowwise=recipe.rowwise, compiled=recipe.compile)
        ctx.save_for_backward(*of_input, *(of_weight if ctx.needs_input_grad[0] else ()))
        ctx.recipe, ctx.source, ctx.x_shape, ctx.weight_shape = recipe, source, x.shape, weight.shape
        y = multiply(left, right, recipe.out_dtype, emulate=recipe.emulate, fast_accumulation=recipe.fast_accumulation)
        # an output that autograd knows as a view could not be changed in place, as by nn.ReLU(inplace=True)
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
        how = {"rowwise": recipe.rowwise, "compiled": recipe.compile}
        if needs_dx and needs_dw:
            left, columns = quantize_both(rows, recipe.grad_dtype, **how)
        elif needs_dx:
            left = quantize(rows, recipe.grad_dtype, **how)
        else:
            columns = quantize(rows.t(), recipe.grad_dtype, **how)
        dx = dw = None
        if needs_dw:
            right = Quantized(saved[0], saved[1])
            dw = multiply(columns, right, recipe.out_dtype, emulate=recipe.emulate)
        if needs_dx:
            right = ctx.source.backward(*(saved[2:] if needs_dw else saved))
            dx = multiply(left, right, recipe.out_dtype, emulate=recipe.emulate)
            dx = dx[:, : ctx.x_shape[-1]].reshape(ctx.x_shape)
        return dx, dw, None, None, None
