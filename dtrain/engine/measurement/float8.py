"""Measures the operands of FP8 products: what their casts lose, with the scales that the products use."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from dtrain.checkpoint.snapshot import TensorShard
from dtrain.distributed.communicator import Communicator
from dtrain.engine.measurement.hooks import on_outputs
from dtrain.engine.measurement.totals import sum_over_ranks
from dtrain.precision.float8.cast import E4M3, Quantized, Scaling, decode, dequantize, quantize, spread
from dtrain.precision.float8.linear import Float8Linear
from dtrain.precision.module_calls import ModuleCall, watch_calls
from dtrain.precision.report import Float8ProductPrecision, OperandPrecision
from dtrain.precision.rounding import loss_of_sums, loss_sums

# each cast of a module: an operand, and whether its scales, if it has several, are those of rows or of columns
_CASTS = tuple((operand, by) for operand in ("input", "weight", "gradient") for by in ("rows", "columns"))
_PRODUCTS = {
    "fprop": (("input", "rows"), ("weight", "rows")),
    "dgrad": (("gradient", "rows"), ("weight", "columns")),
    "wgrad": (("gradient", "columns"), ("input", "columns")),
}


class Float8Measurement:
    """Measures what the casts of each FP8 module lose in one step.

    Inputs and gradients are cast again. Weights are not: their copies are compared with the masters that this rank
    owns, so that the ranks together compare each element once.

    Args:
        modules: the FP8 modules by name.
        masters: this rank's owned masters by the name of the parameter.
        device: where the totals lie.
    """

    def __init__(
        self, modules: Mapping[str, Float8Linear], masters: Mapping[str, TensorShard], device: torch.device
    ) -> None:
        self._modules = modules
        self._numbers = {name: number for number, name in enumerate(modules)}
        self._masters = masters
        self._sums = torch.zeros(len(modules), len(_CASTS), 5, dtype=torch.float64, device=device)
        self._has_weight: set[int] = set()

    def hooks(self) -> AbstractContextManager[object]:
        stack = on_outputs(self._modules, self._on_gradient)
        stack.enter_context(watch_calls(self._modules, begin=self._on_input))
        return stack

    @torch.no_grad()
    def _on_input(self, call: ModuleCall) -> None:
        x, *_ = (*call.args, *call.kwargs.values())
        module, number = self._modules[call.name], self._numbers[call.name]
        if module.computes_in_fp32(x.device.type):
            return
        self._add_cast(number, module, "input", x, E4M3)
        master = self._masters.get(f"{call.name}.weight")
        if number not in self._has_weight and master is not None:
            self._has_weight.add(number)
            copies = module.quantized_weight.copies(module.weight_parameter)
            for by, copy in zip(("rows", "columns"), copies, strict=True):
                self._add_weight(number, by, copy, master)

    @torch.no_grad()
    def _on_gradient(self, name: str, gradient: Tensor) -> None:
        module = self._modules[name]
        # a module that computed in FP32 has returned FP32
        if gradient.dtype == module.recipe.out_dtype:
            factor = module.quantized_weight.gradient_factor
            cast = gradient if factor is None else gradient * factor
            self._add_cast(self._numbers[name], module, "gradient", cast, module.recipe.grad_dtype)

    def _add_cast(self, number: int, module: Float8Linear, operand: str, x: Tensor, dtype: torch.dtype) -> None:
        rows = x.reshape(-1, x.shape[-1])
        scaling = module.recipe.scaling
        sums = _cast_sums(rows, dtype, scaling)
        by_columns = sums if scaling is Scaling.TENSOR else _cast_sums(rows.t(), dtype, scaling)
        for by, own in (("rows", sums), ("columns", by_columns)):
            self._sums[number, _CASTS.index((operand, by))] += own

    def _add_weight(self, number: int, by: str, copy: Quantized, master: TensorShard) -> None:
        scale = copy.scale
        if scale.dim():
            shape = copy.values.shape
            of_each = spread(scale, shape) if by == "rows" or scale.dim() == 2 else scale.unsqueeze(0)
            scale = of_each.expand(shape).reshape(-1)[master.start : master.stop]
        values = decode(copy.values.reshape(-1)[master.start : master.stop]) * scale
        largest = torch.finfo(E4M3).max * scale
        device = self._sums.device  # masters may lie on the host
        self._sums[number, _CASTS.index(("weight", by))] += loss_sums(
            master.data.to(device), values.to(device), largest=largest.to(device)
        )

    def totals(self, comm: Communicator) -> tuple[Float8ProductPrecision, ...]:
        """Returns the products of the modules that ran in the step; all ranks call."""
        if not self._modules:
            return ()
        sums = sum_over_ranks(comm, self._sums, label="FP8 operands").tolist()
        found = []
        for (name, module), own in zip(self._modules.items(), sums, strict=True):
            losses = dict(zip(_CASTS, map(loss_of_sums, own), strict=True))
            formats = {"input": "e4m3", "weight": "e4m3"}
            formats["gradient"] = "e4m3" if module.recipe.grad_dtype == E4M3 else "e5m2"
            weight = module._parameters.get("weight")  # `[...]` would need it unsharded
            for product, casts in _PRODUCTS.items():
                if product not in module.recipe.products:
                    continue
                if product == "wgrad" and weight is not None and not weight.requires_grad:
                    continue
                operands = tuple(
                    OperandPrecision.of(cast[0], formats[cast[0]], losses[cast]) for cast in casts if losses[cast].numel
                )
                if operands:
                    found.append(Float8ProductPrecision.of(name, product, operands))
        return tuple(found)


def _cast_sums(rows: Tensor, dtype: torch.dtype, scaling: Scaling) -> Tensor:
    """Returns what ``loss_sums`` does, in a third of its passes: no element exceeds a scale of its own maximum."""
    rounded, x = dequantize(quantize(rows, dtype, scaling)), rows.float()
    norms = torch.stack((torch.linalg.vector_norm(x), torch.linalg.vector_norm(rounded - x)))
    # zeros stay zeros, so the others have become so; with an Inf all are NaN, zeros too
    underflows = (torch.count_nonzero(x) - torch.count_nonzero(rounded)).clamp(min=0)
    counts = (norms.new_full((), x.numel()), underflows, norms.new_zeros(()))
    return torch.cat((torch.stack([count.double() for count in counts]), norms.double().square_()))
