"""The three products of a Linear or a convolution, computed with operands rounded to a format.

fprop is y = x W^T + b, dgrad dx = dy W, wgrad dW = dy^T x. Products of rounded operands are computed in FP32, because
every format's products are summed in FP32, and the result is rounded as an engine stores it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.precision.float8.cast import E4M3, E5M2, dequantize, quantize
from dtrain.precision.float8.options import Recipe
from dtrain.precision.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, TF32, FloatFormat
from dtrain.precision.rounding import round_mantissa, rounded
from dtrain.tools.probe.measures import Measure, Operand, count, energies

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
    """What one call of a product multiplied; ``dy`` is None if no gradient reached it."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    dy: Tensor | None
    needs_dx: bool
    needs_dw: bool


@dataclass(frozen=True)
class Exact:
    """The FP32 results."""

    y: Tensor
    dx: Tensor | None
    dw: Tensor | None


class ProductCall:
    """One call of a product module, in FP32 and in any format."""

    def __init__(self, module: nn.Module, operands: Operands) -> None:
        self._module = module
        self._operands = operands
        self.exact = Exact(*self._multiply(operands.x, operands.weight, operands.bias, operands.dy))

    @property
    def gain(self) -> float:
        """How much one step along the exact weight gradient would change the loss, per unit of the learning rate."""
        dw = self.exact.dw
        return 0.0 if dw is None else float((dw * _preconditioned(dw)).sum(dtype=torch.float64))

    def measure(self, format_name: str, recipe: Recipe, scale: float = 1.0) -> dict[str, Measure]:
        """Returns a measure for each product that the call needs: the change of dgrad is relative to dx.

        Args:
            recipe: options of FP8 products.
            scale: loss scale, by which gradients are multiplied before they are rounded.
        """
        if format_name == "fp8":
            return self._measure_float8(recipe)
        return self._measure_elementwise(FLOATS[format_name], scale)

    def _measure_elementwise(self, floats: FloatFormat, scale: float) -> dict[str, Measure]:
        given = self._operands
        operands = (given.x, given.weight, given.bias, None if given.dy is None else given.dy * scale)
        quantized = [None if t is None else rounded(t, floats) for t in operands]
        unlimited = [None if t is None else round_mantissa(t.float(), floats.mantissa_bits) for t in operands]
        counts = [Operand() if t is None else count(t, q) for t, q in zip(operands, quantized, strict=True)]  # type: ignore[arg-type]
        is_limited = any(q is not None and not torch.equal(q, u) for q, u in zip(quantized, unlimited, strict=True))  # type: ignore[arg-type]
        store = (lambda t: t) if floats is TF32 else partial(rounded, floats=floats)  # TF32 results are FP32
        results = [_stored(t, store) for t in self._multiply(*quantized)]  # type: ignore[arg-type]
        if is_limited:
            without_limit = self._multiply(*unlimited)  # type: ignore[arg-type]
            wide = [_stored(t, partial(round_mantissa, mantissa_bits=floats.mantissa_bits)) for t in without_limit]
        else:
            wide = results
        x, w, b, dy = counts
        used = {"fprop": x + w + b, "dgrad": dy + w, "wgrad": dy + x}
        return dict(self._compare(used, results, wide, scale))

    def _measure_float8(self, recipe: Recipe) -> dict[str, Measure]:
        given = self._operands
        x, w = given.x.reshape(-1, given.x.shape[-1]), given.weight
        dy = None if given.dy is None else given.dy.reshape(-1, w.shape[0])
        grad = recipe.grad_dtype
        pairs: dict[str, tuple[Tensor, torch.dtype, Tensor]] = {"fprop": (x, E4M3, w)}
        if dy is not None:
            pairs["dgrad"] = (dy, grad, w.t())
            pairs["wgrad"] = (dy.t(), grad, x.t())
        results: list[Tensor | None] = [None, None, None]
        wide: list[Tensor | None] = [None, None, None]
        used = {}
        for index, (name, (left, dtype, right)) in enumerate(pairs.items()):
            if (name == "dgrad" and self.exact.dx is None) or (name == "wgrad" and self.exact.dw is None):
                continue
            sides = [_float8(left, dtype, recipe), _float8(right, E4M3, recipe)]
            used[name] = sides[0][2] + sides[1][2]
            bias = given.bias if name == "fprop" else None
            results[index] = self._float8_result(name, sides[0][0], sides[1][0], bias)
            wide[index] = self._float8_result(name, sides[0][1], sides[1][1], bias)
        return dict(self._compare(used, results, wide, 1.0))

    def _float8_result(self, name: str, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
        out = rounded(left @ right.t(), BF16)
        if bias is not None:
            out = rounded(out + rounded(bias, BF16), BF16)
        exact = {"fprop": self.exact.y, "dgrad": self.exact.dx, "wgrad": self.exact.dw}[name]
        assert exact is not None
        return out.reshape(exact.shape)

    def _compare(
        self, used: dict[str, Operand], results: list[Tensor | None], wide: list[Tensor | None], scale: float
    ) -> Iterator[tuple[str, Measure]]:
        exact = self.exact
        gradients = {"fprop": self._operands.dy, "dgrad": exact.dx, "wgrad": None}
        triples = zip(("fprop", "dgrad", "wgrad"), (exact.y, exact.dx, exact.dw), results, wide, strict=True)
        for name, reference, computed, unlimited in triples:
            if reference is None or computed is None or unlimited is None:
                continue
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

    def _multiply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns y, dx and dW of FP32 operands."""
        given, module = self._operands, self._module
        needs_dx, needs_dw = given.needs_dx and dy is not None, given.needs_dw and dy is not None
        if isinstance(module, nn.Linear):
            y = F.linear(x, weight, bias)
            if dy is None:
                return y, None, None
            rows = dy.reshape(-1, dy.shape[-1])
            dw = rows.t() @ x.reshape(-1, x.shape[-1]) if needs_dw else None
            return y, dy @ weight if needs_dx else None, dw
        with torch.enable_grad():
            x, weight = x.detach().requires_grad_(needs_dx), weight.detach().requires_grad_(needs_dw)
            replaced = {"weight": weight} | ({} if bias is None else {"bias": bias})
            y = torch.func.functional_call(module, replaced, (x,))
        wanted = [t for t in (x, weight) if t.requires_grad]
        gradients = list(torch.autograd.grad(y, wanted, dy)) if wanted else []
        dx = gradients.pop(0) if needs_dx else None
        return y.detach(), dx, gradients.pop(0) if needs_dw else None


def _stored(result: Tensor | None, store: Callable[[Tensor], Tensor]) -> Tensor | None:
    return None if result is None else store(result)


def _preconditioned(dw: Tensor) -> Tensor:
    """Returns the direction in which AdamW's first update goes: each element over its magnitude."""
    return dw / (dw.abs() + ADAM_EPS)


def _float8(matrix: Tensor, dtype: torch.dtype, recipe: Recipe) -> tuple[Tensor, Tensor, Operand]:
    """Returns the matrix in FP8, with its mantissa but unlimited range, and what was lost."""
    matrix = rounded(matrix, BF16)  # what the modules before and after hand over
    quantized = dequantize(quantize(matrix, dtype, rowwise=recipe.rowwise))
    unlimited = round_mantissa(matrix, _FLOAT8[dtype].mantissa_bits)
    return quantized, unlimited, count(matrix, quantized)
