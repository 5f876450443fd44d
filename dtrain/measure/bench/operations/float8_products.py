"""Times the three products of a Linear in BF16 and FP8, separately and together with their casts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from dtrain.device import alternating_ms
from dtrain.measure.bench.records import LinearFormat, ProductTimes
from dtrain.precision.float8.cast import E4M3, Quantized, quantize
from dtrain.precision.float8.linear import convert
from dtrain.precision.float8.matmul import ALIGNMENT, multiply
from dtrain.precision.float8.options import Recipe
from dtrain.precision.float8.weights import Cache, QuantizedWeight

ALL_THREE = "all three, with casts"
_BF16 = "bf16"
_REPEATS = {"cpu": 1, "cuda": 20}  # on a GPU one product is as short as its launch


def product_shapes(linears: Iterable[LinearFormat]) -> list[tuple[int, int]]:
    """Returns the distinct weight shapes that FP8 Tensor Cores accept without padding, in the order of the model."""
    shapes = dict.fromkeys((linear.out_features, linear.in_features) for linear in linears)
    return [shape for shape in shapes if not any(size % ALIGNMENT for size in shape)]


def time_products(
    width: int, rows: int, shape: tuple[int, int], recipes: dict[str, Recipe], rounds: int, device: torch.device
) -> list[ProductTimes]:
    """Times the three products of a Linear separately, then together with their casts, in BF16 and in each recipe.

    ``shape`` is that of the weight. Separately, the operands are cast beforehand. Together, all casts are timed but the
    weight's, which a step needs only once.
    """
    x, gradient, weight = (
        torch.randn(size, device=device, dtype=torch.bfloat16) for size in ((rows, shape[1]), (rows, shape[0]), shape)
    )
    operands = {
        "output": (x, weight),
        "input gradient": (gradient, weight.t()),
        "weight gradient": (gradient.t(), x.t()),
    }
    workloads = {
        product: {_BF16: lambda left=left, right=right: left @ right.t()}
        | {name: _product(left, right, product, recipe) for name, recipe in recipes.items()}
        for product, (left, right) in operands.items()
    }
    workloads[ALL_THREE] = {_BF16: _linear(weight, x, gradient, None)} | {
        name: _linear(weight, x, gradient, recipe) for name, recipe in recipes.items()
    }
    sizes = {product: [left.shape[0], right.shape[0], left.shape[1]] for product, (left, right) in operands.items()}
    return [
        ProductTimes(
            width,
            product,
            sizes.get(product, sizes["output"]),
            1 if product in operands else len(operands),
            alternating_ms(cases, device, rounds, calls=_REPEATS[device.type]),
        )
        for product, cases in workloads.items()
    ]


def _product(left: Tensor, right: Tensor, product: str, recipe: Recipe) -> Callable[[], object]:
    """Returns the product of ``left`` [M, K] and ``right`` [N, K] transposed; both are cast beforehand, untimed."""
    kind = E4M3 if product == "output" else recipe.grad_dtype
    a, b = quantize(left, kind, rowwise=recipe.rowwise), quantize(right, E4M3, rowwise=recipe.rowwise)
    a, b = (Quantized(operand.values.contiguous(), operand.scale) for operand in (a, b))
    return lambda: multiply(a, b, recipe.out_dtype, emulate=recipe.emulate)


def _linear(weight: Tensor, x: Tensor, gradient: Tensor, recipe: Recipe | None) -> Callable[[], object]:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight)
    if recipe is not None:
        convert(linear, recipe, QuantizedWeight(recipe, Cache.UNTIL_WRITTEN))
    inputs = x.detach().requires_grad_()

    def run() -> None:
        linear(inputs).backward(gradient)
        linear.zero_grad()
        inputs.grad = None

    return run
