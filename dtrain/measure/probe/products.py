"""The three products of a Linear or a convolution, computed with operands rounded to a format.

fprop is y = x W^T + b, dgrad dx = dy W, wgrad dW = dy^T x. Products of rounded operands are computed in FP32, because
every format's products are summed in FP32, and the result is rounded as an engine stores it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.measure.probe.measures import WORTH_NAMING_DB, Measure, Operand, count, decibels, energies
from dtrain.precision.float8.cast import E4M3, E5M2, Scaling, dequantize, quantize
from dtrain.precision.float8.options import Recipe
from dtrain.precision.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, TF32, FloatFormat
from dtrain.precision.rounding import round_mantissa, rounded

FLOATS = {"tf32": TF32, "bf16": BF16, "fp16": FP16}
_FLOAT8 = {E4M3: FP8_E4M3, E5M2: FP8_E5M2}

ADAM_EPS = 1e-8
"""Epsilon of the preconditioner in which the error of a weight gradient is weighed."""


def is_product(module: nn.Module) -> bool:
    """Whether ``module`` is a Linear or a convolution, with PyTorch's own forward."""
    if "forward" in module.__dict__:
        return False
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward
    is_convolution = isinstance(module, nn.modules.conv._ConvNd)
    return is_convolution and type(module).forward.__module__ == nn.modules.conv.__name__


@dataclass(frozen=True)
class Operands:
    """Operands of one call of a product; ``dy`` is None if no gradient reached it."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    dy: Tensor | None
    needs_dx: bool
    needs_dw: bool


Results = dict[str, Tensor]
"""y, dx and dW by ``fprop``, ``dgrad`` and ``wgrad``, those that the call needs."""


@dataclass(frozen=True)
class _Computed:
    """Products in a format.

    Attributes:
        counts: what rounding lost in the operands of each product.
        may_be_range: whether unlimited range could remove most of the error.
        without_limit: computes the products with the format's mantissa and unlimited range.
    """

    counts: Mapping[str, Operand]
    results: Results
    may_be_range: bool
    without_limit: Callable[[], Results]


@dataclass(frozen=True)
class _Matrix:
    """An operand of an FP8 product: exact, in FP8, and with its mantissa but unlimited range."""

    exact: Tensor
    quantized: Tensor
    unlimited: Tensor
    dtype: torch.dtype

    @staticmethod
    def of(matrix: Tensor, dtype: torch.dtype, scaling: Scaling) -> _Matrix:
        exact = rounded(matrix, BF16)  # as the modules before and after hand it over
        quantized = dequantize(quantize(exact, dtype, scaling))
        return _Matrix(exact, quantized, round_mantissa(exact, _FLOAT8[dtype].mantissa_bits), dtype)

    def transposed(self, scaling: Scaling) -> _Matrix:
        if scaling in (Scaling.ROWS, Scaling.LINES):  # with other scales
            return _Matrix.of(self.exact.t(), self.dtype, scaling)
        return _Matrix(self.exact.t(), self.quantized.t(), self.unlimited.t(), self.dtype)

    def count(self) -> Operand:
        return count(self.exact, self.quantized)

    def loses_range(self) -> bool:
        """Whether the format's range adds half as much error, or more, to that of its mantissa."""
        noise, of_mantissa = ((t - self.exact).square().sum() for t in (self.quantized, self.unlimited))
        return bool(noise > 1.5 * of_mantissa)


class ProductCall:
    """One call of a product module, in FP32 and in any format."""

    def __init__(self, module: nn.Module, operands: Operands) -> None:
        self._module = module
        self._operands = operands
        self.exact = self._multiply(operands.x, operands.weight, operands.bias, operands.dy)

    @property
    def gain(self) -> float:
        """Change of the loss by one step along the exact weight gradient, per unit of the learning rate."""
        dw = self.exact.get("wgrad")
        return 0.0 if dw is None else float((dw * _preconditioned(dw)).sum(dtype=torch.float64))

    def measure(self, format_name: str, recipe: Recipe, scale: float = 1.0) -> dict[str, Measure]:
        """Returns a measure for each product that the call needs: the change of dgrad is relative to dx.

        Args:
            recipe: options of FP8 products.
            scale: loss scale, by which gradients are multiplied before they are rounded.
        """
        given = self._float8(recipe) if format_name == "fp8" else self._elementwise(FLOATS[format_name], scale)
        measures = dict(self._compare(given.counts, given.results, given.results, scale))
        is_large = any(decibels(m.signal, m.noise) < WORTH_NAMING_DB for m in measures.values())
        if is_large and given.may_be_range:  # only then the cause is in question
            measures = dict(self._compare(given.counts, given.results, given.without_limit(), scale))
        return measures

    def _elementwise(self, floats: FloatFormat, scale: float) -> _Computed:
        given = self._operands
        exact = (given.x, given.weight, given.bias, None if given.dy is None else given.dy * scale)
        quantized = [_stored(t, partial(rounded, floats=floats)) for t in exact]
        x, w, b, dy = (
            Operand() if q is None or t is None else count(t, q) for t, q in zip(exact, quantized, strict=True)
        )
        cut = partial(round_mantissa, mantissa_bits=floats.mantissa_bits)
        results = self._multiply(*quantized)  # type: ignore[arg-type]
        if floats is not TF32:  # whose results are FP32
            results = {name: rounded(result, floats) for name, result in results.items()}

        def without_limit() -> Results:
            unlimited = self._multiply(*(_stored(t, cut) for t in exact))  # type: ignore[arg-type]
            return unlimited if floats is TF32 else {name: cut(result) for name, result in unlimited.items()}

        # the exponents of BF16 and TF32 are those of FP32
        may_be_range = floats is FP16 or any(c.underflows or c.saturated for c in (x, w, b, dy))
        counts = {"fprop": x + w + b, "dgrad": dy + w, "wgrad": dy + x}
        return _Computed(counts, results, may_be_range, without_limit)

    def _float8(self, recipe: Recipe) -> _Computed:
        given = self._operands
        x, w = given.x.reshape(-1, given.x.shape[-1]), given.weight
        dy = None if given.dy is None else given.dy.reshape(-1, w.shape[0])
        # pairs [rows, n], [columns, n], whose rows may have a scale each
        pairs: dict[str, tuple[_Matrix, _Matrix]] = {}
        scaling = recipe.scaling
        by_rows = _Matrix.of(x, E4M3, scaling), _Matrix.of(w, E4M3, recipe.weight_scaling)
        pairs["fprop"] = by_rows
        if dy is not None and "dgrad" in self.exact:
            gradient = _Matrix.of(dy, recipe.grad_dtype, scaling)
            pairs["dgrad"] = gradient, by_rows[1].transposed(recipe.weight_scaling)
        if dy is not None and "wgrad" in self.exact and "wgrad" in recipe.products:
            gradient = pairs["dgrad"][0] if "dgrad" in pairs else _Matrix.of(dy, recipe.grad_dtype, scaling)
            pairs["wgrad"] = gradient.transposed(scaling), by_rows[0].transposed(scaling)

        counts = {name: left.count() + right.count() for name, (left, right) in pairs.items()}
        others: Results = {}
        for name in self.exact.keys() - pairs.keys():  # the recipe leaves it in BF16
            in_bf16 = self._elementwise(BF16, 1.0)
            counts[name], others[name] = in_bf16.counts[name], in_bf16.results[name]

        def multiply(part: str) -> Results:
            of_pairs = {
                name: self._float8_result(name, *(getattr(side, part) for side in pair)) for name, pair in pairs.items()
            }
            return of_pairs | others

        may_be_range = any(side.loses_range() for pair in pairs.values() for side in pair)
        return _Computed(counts, multiply("quantized"), may_be_range, partial(multiply, "unlimited"))

    def _float8_result(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        out = rounded(left @ right.t(), BF16)
        if name == "fprop" and self._operands.bias is not None:
            out = rounded(out + rounded(self._operands.bias, BF16), BF16)
        return out.reshape(self.exact[name].shape)

    def _compare(
        self, used: Mapping[str, Operand], results: Results, wide: Results, scale: float
    ) -> Iterator[tuple[str, Measure]]:
        gradients = {"fprop": self._operands.dy, "dgrad": self.exact.get("dgrad")}
        for name, reference in self.exact.items():
            computed, unlimited = results[name], wide[name]
            factor = 1.0 if name == "fprop" else 1.0 / scale
            gradient = _preconditioned(reference) if name == "wgrad" else gradients[name]
            signal, noise, change = energies(reference, computed * factor, gradient)
            if math.isnan(signal):  # FP32 itself overflows
                continue
            wide_noise = noise
            if unlimited is not computed:
                wide_noise = energies(reference, unlimited * factor)[1]
            if name == "dgrad":
                change = change / signal if signal else 0.0  # the share of dx that is lost along dx
            yield name, Measure(used[name], signal, noise, wide_noise, change)

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor | None) -> Results:
        """Returns the results for FP32 operands."""
        given, module = self._operands, self._module
        needs_dx, needs_dw = given.needs_dx and dy is not None, given.needs_dw and dy is not None
        if isinstance(module, nn.Linear):
            results = {"fprop": F.linear(x, weight, bias)}
            if needs_dx and dy is not None:
                results["dgrad"] = dy @ weight
            if needs_dw and dy is not None:
                results["wgrad"] = dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
            return results
        with torch.enable_grad():
            x, weight = x.detach().requires_grad_(needs_dx), weight.detach().requires_grad_(needs_dw)
            replaced = {"weight": weight} | ({} if bias is None else {"bias": bias})
            y = torch.func.functional_call(module, replaced, (x,))
        wanted = {name: t for name, t in (("dgrad", x), ("wgrad", weight)) if t.requires_grad}
        gradients = torch.autograd.grad(y, [*wanted.values()], dy) if wanted else ()
        return {"fprop": y.detach(), **dict(zip(wanted, gradients, strict=True))}


def _stored(result: Tensor | None, store: Callable[[Tensor], Tensor]) -> Tensor | None:
    return None if result is None else store(result)


def _preconditioned(dw: Tensor) -> Tensor:
    """Returns the direction in which AdamW's first update goes: each element over its magnitude."""
    return dw / (dw.abs() + ADAM_EPS)
