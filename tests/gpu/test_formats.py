"""Number formats on one GPU: casts are those of the tables, and products hold the bound of FP32 sums."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dtrain
from dtrain.precision.formats import BF16, FP16, TF32, FloatFormat
from tests.gpu.device import DEVICE, ON_CPU, capability
from tests.unit.precision.test_formats import DTYPES, LOW
from tests.unit.precision.test_rounding_bound import NUM_OUT, numbers, product_bound, share_of_bound


@pytest.mark.parametrize("floats", LOW, ids=lambda floats: floats.name)
def test_a_cast_rounds_as_the_format_says(floats: FloatFormat) -> None:
    """Within the range: dtrain clamps before it casts to FP8."""
    generator = torch.Generator().manual_seed(0)
    x = torch.exp2(torch.rand(2000, generator=generator) * 60 - 40).clamp(max=floats.max)
    low = x.to(DEVICE).to(DTYPES[floats]).double().cpu()
    for number, value in zip(x.tolist(), low.tolist(), strict=True):
        assert floats.rounded(number).value == value, number


@pytest.mark.parametrize("length", [64, 1024, 32768])
@pytest.mark.parametrize("name", ["tf32", "bf16", "fp16"])
def test_products_hold_the_bound_of_fp32_sums(name: str, length: int) -> None:
    """Long and narrow, so that the library splits the sums."""
    if ON_CPU and name == "tf32":
        pytest.skip("needs a GPU: TF32")
    if name != "fp16" and not ON_CPU and capability()[0] < 8:
        pytest.skip("older than Ampere")
    # a Tensor Core may cut what enters a TF32 product: as if it had one bit less
    cut = FloatFormat("cut", TF32.exponent_bits, TF32.mantissa_bits - 1)
    operands = {"tf32": cut, "bf16": BF16, "fp16": FP16}[name]
    model = nn.Linear(length, NUM_OUT, bias=False)
    scale = 2.0**-6  # sums stay in FP16's range
    weight = numbers(NUM_OUT, length, seed=1) * scale
    model.weight.data = weight.clone()
    engine = dtrain.initialize(model.to(DEVICE), precision=name, seed=0)
    x = numbers(16, length, seed=2)
    with engine.eval(), torch.no_grad():
        y = engine(x.to(DEVICE)).cpu()
    output = {"bf16": BF16, "fp16": FP16}.get(name)
    bound = product_bound(length, operands, output=output) if output else product_bound(length, operands)
    assert share_of_bound(y, x, weight.t(), bound) <= 1
