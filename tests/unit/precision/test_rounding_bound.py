"""The rounding-error bound of a product of length n holds in every format, and reduced-precision sums break it.

|fl(x.y) - x.y| <= ((1 + u)^2 (1 + gamma_n) (1 + v) - 1) |x|.|y|: operands rounded with u, summed in FP32, the sum
rounded with v. The exact products are those of FP64, whose own error is far below.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import dtrain
from dtrain.precision.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, TF32, FloatFormat

LENGTHS = (1, 17, 300)
NUM_OUT = 16
ENGINES = {"fp32": (FP32, FP32), "bf16": (BF16, BF16), "fp16": (FP16, FP16)}


def product_bound(length: int, operands: FloatFormat, output: FloatFormat = FP32) -> float:
    """The largest error of a computed x.y relative to |x|.|y|, for numbers in the normal ranges."""
    product = length * FP32.epsilon / 2  # gamma_n: Higham, "Accuracy and Stability of Numerical Algorithms", 3.1
    rounded_at_the_end = output.epsilon / 2 if output != FP32 else 0.0
    return (1 + operands.epsilon / 2) ** 2 * (1 + product / (1 - product)) * (1 + rounded_at_the_end) - 1


def numbers(*shape: int, seed: int, one_sided: bool = False) -> Tensor:
    """FP32 in the normal range of every format, even scaled by its largest: magnitudes from 1/8 to 4."""
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.exp2(torch.rand(*shape, generator=generator) * 5 - 3)
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return magnitudes if one_sided else magnitudes * signs


def share_of_bound(got: Tensor, x: Tensor, y: Tensor, bound: float) -> float:
    """The largest error of ``got``, which stands for ``x @ y``, over what is allowed."""
    exact = x.double() @ y.double()
    allowed = bound * (x.double().abs() @ y.double().abs())
    return float(((got.double() - exact).abs() / allowed).max())


@pytest.fixture(scope="module")
def engines() -> dict[tuple[str, int], dtrain.Engine]:
    built = {}
    for name, length in itertools.product(ENGINES, LENGTHS):
        model = nn.Linear(length, NUM_OUT, bias=False)
        model.weight.data = numbers(NUM_OUT, length, seed=length)
        built[name, length] = dtrain.initialize(model, precision=name, seed=0)
    return built


CASES = st.tuples(st.sampled_from(sorted(ENGINES)), st.sampled_from(LENGTHS))


@settings(max_examples=60)
@given(CASES, st.sampled_from((1, 16)), st.integers(0, 2**32 - 1), st.booleans())
def test_a_linear_under_an_engine(
    engines: dict[tuple[str, int], dtrain.Engine], case: tuple[str, int], rows: int, seed: int, one_sided: bool
) -> None:
    engine, (name, length) = engines[case], case
    operands, output = ENGINES[name]
    x = numbers(rows, length, seed=seed, one_sided=one_sided)
    with engine.eval(), torch.no_grad():
        y = engine(x)
    weight = numbers(NUM_OUT, length, seed=length)
    assert share_of_bound(y, x, weight.t(), product_bound(length, operands, output=output)) <= 1


def test_products_are_summed_in_fp32_on_a_gpu_too() -> None:
    """By default PyTorch lets cuBLAS add the partial sums of a split matmul in 16 bits."""
    matmul = torch.backends.cuda.matmul
    reductions = [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")]
    for name in (*reductions, "allow_fp16_accumulation"):
        setattr(matmul, name, True)
    dtrain.initialize(nn.Linear(1, 1), precision="bf16", seed=0)
    assert not any(getattr(matmul, name) for name in (*reductions, "allow_fp16_accumulation"))


@pytest.mark.parametrize("floats", [BF16, FP16, TF32, FP8_E4M3, FP8_E5M2], ids=lambda floats: floats.name)
def test_it_is_not_loose(floats: FloatFormat) -> None:
    """A product of the worst numbers of a binade comes near it; of a narrower format it breaks it."""
    worst = 1 + floats.epsilon / 2
    rounded = floats.rounded(worst).value
    x, operand = (torch.full((1, 64), value, dtype=torch.float64) for value in (worst, rounded))
    product = (operand.float() @ operand.float().t()).double()
    assert 0.7 < share_of_bound(product, x, x.t(), product_bound(64, floats)) <= 1
    narrower = FloatFormat("one bit more", 8, floats.mantissa_bits + 1)
    assert share_of_bound(product, x, x.t(), product_bound(64, narrower)) > 1
