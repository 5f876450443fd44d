"""The products of a Linear are timed in every recipe."""

from __future__ import annotations

from dataclasses import replace

import torch

from dtrain.config.precision import Float8
from dtrain.precision.float8.options import Recipe, resolve_float8
from dtrain.tools.bench.operations.float8_products import ALL_THREE, time_products

CPU = torch.device("cpu")


def test_each_product_of_a_linear_is_timed_in_bf16_and_every_recipe() -> None:
    options = Float8(emulate=True)
    recipes = {
        name: Recipe.of(resolve_float8(replace(options, recipe=name), CPU), torch.bfloat16)
        for name in ("tensorwise", "rowwise")
    }
    found = time_products(24, 48, 32, recipes, 2, CPU)
    assert [product.product for product in found] == ["output", "input gradient", "weight gradient", ALL_THREE]
    for product in found:
        assert (product.rows, product.out_features, product.in_features) == (24, 48, 32)
        assert list(product.ms) == ["bf16", "tensorwise", "rowwise"]
        assert all(len(ms) == 2 for ms in product.ms.values())
