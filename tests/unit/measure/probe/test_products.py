"""The products of FP8 recipes as the probe measures them, against computations that share no code with it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from dtrain.measure.probe.measures import Measure
from dtrain.measure.probe.products import Operands, ProductCall
from dtrain.precision.float8.cast import E4M3
from dtrain.precision.float8.options import PRODUCTS, Recipe

ROWS, INNER, COLUMNS = 160, 256, 384


def call() -> tuple[ProductCall, Tensor, Tensor, Tensor]:
    """A product whose blocks weigh the same, large numbers by small ones, and differ by more than E4M3's range."""
    linear, generator = nn.Linear(INNER, COLUMNS, bias=False), torch.Generator().manual_seed(0)

    def normal(rows: int, columns: int, of_rows: float, of_columns: float) -> Tensor:
        blocks = (torch.arange(rows).unsqueeze(1) // 128 % 2, torch.arange(columns) // 128 % 2)
        return torch.randn(rows, columns, generator=generator) * of_rows ** blocks[0] * of_columns ** blocks[1]

    x, dy = normal(ROWS, INNER, 2.0**14, 2.0**15), normal(ROWS, COLUMNS, 2.0**-14, 2.0**16)
    weight = normal(COLUMNS, INNER, 2.0**-16, 2.0**-15)
    return ProductCall(linear, Operands(x, weight, None, dy, True, True)), x, weight, dy


def in_e4m3(matrix: Tensor, height: int, width: int) -> Tensor:
    """``matrix`` in BF16 and then E4M3, in double: each block of that size over the power of two that lets it fit."""
    given = matrix.bfloat16().double()
    rounded = torch.empty_like(given)
    for top in range(0, matrix.shape[0], height):
        for left in range(0, matrix.shape[1], width):
            block = (slice(top, top + height), slice(left, left + width))
            scale = 2.0 ** math.ceil(math.log2(float(given[block].abs().max()) / 448))
            exponent = torch.frexp(given[block] / scale).exponent - 1
            unit = torch.exp2(exponent.clamp(min=-6).double() - 3)
            rounded[block] = (given[block] / scale / unit).round() * unit * scale
    return rounded


def decibels(exact: Tensor, computed: Tensor) -> float:
    noise = (computed.bfloat16().double() - exact).square().sum()
    return float(10 * (exact.square().sum() / noise).log10())


def measured(found: Measure) -> float:
    return 10 * math.log10(found.signal / found.noise)


def test_a_blockwise_product_is_measured_with_a_scale_for_each_line_and_square() -> None:
    product, x, weight, dy = call()
    found = product.measure("fp8", Recipe("blockwise", E4M3))
    of_weight = in_e4m3(weight, 128, 128)
    expected = {
        "fprop": (x.double() @ weight.double().t(), in_e4m3(x, 1, 128) @ of_weight.t()),
        "dgrad": (dy.double() @ weight.double(), in_e4m3(dy, 1, 128) @ of_weight),
        # along the rows of the batch, which the last block does not fill
        "wgrad": (dy.double().t() @ x.double(), in_e4m3(dy.t(), 1, 128) @ in_e4m3(x.t(), 1, 128).t()),
    }
    assert {name: measured(own) for name, own in found.items()} == pytest.approx(
        {name: decibels(*pair) for name, pair in expected.items()}, abs=1e-3
    )
    for other in ("tensorwise", "rowwise"):
        coarser = product.measure("fp8", Recipe(other, E4M3))
        assert all(measured(own) > measured(coarser[name]) + 1 for name, own in found.items()), other


def test_a_product_that_the_recipe_leaves_in_bf16_is_measured_in_it() -> None:
    product, *_ = call()
    found = product.measure("fp8", Recipe("rowwise_bf16_wgrad", E4M3, products=PRODUCTS[:2]))
    rowwise, bf16 = product.measure("fp8", Recipe("rowwise", E4M3)), product.measure("bf16", Recipe())
    assert found == {**rowwise, "wgrad": bf16["wgrad"]}
    assert measured(found["wgrad"]) > measured(rowwise["wgrad"]) + 15
