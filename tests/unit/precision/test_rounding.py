"""Rounding of tensors against the exact arithmetic of ``formats``."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtrain.precision.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, TF32, FloatFormat
from dtrain.precision.rounding import measure_loss, round_mantissa, rounded

finite = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)


@pytest.mark.parametrize("floats", [FP32, TF32, BF16, FP16, FP8_E4M3, FP8_E5M2], ids=lambda f: f.name)
@given(value=finite)
def test_a_rounded_tensor_equals_exact_rounding(floats: FloatFormat, value: float) -> None:
    scale = 1.0 if floats in (FP8_E4M3, FP8_E5M2) else None
    got = rounded(torch.tensor([value]), floats, scale).item()
    expected = floats.rounded(value).value
    if floats is FP8_E5M2 and math.isinf(expected):  # the cast of the engines saturates
        expected = math.copysign(floats.max, value)
    assert got == expected


@given(value=finite, bits=st.integers(1, 23))
def test_mantissa_rounding_keeps_the_range(value: float, bits: int) -> None:
    got = round_mantissa(torch.tensor([value]), bits).item()
    assert got == FloatFormat("wide", 8, bits).rounded(value).value


def test_the_default_scale_fits_the_largest_magnitude() -> None:
    x = torch.tensor([1e-3, 3e4, -2e5])
    assert rounded(x, FP8_E4M3)[2] == pytest.approx(-2e5, rel=1 / 16)
    assert rounded(x * 0, FP8_E4M3).tolist() == [0.0, 0.0, 0.0]


def test_loss_counts_underflow_saturation_and_noise() -> None:
    x = torch.tensor([1.0, 3e-8, 1e5, 0.0, math.inf, 2.0**-10])
    loss = measure_loss(x, rounded(x, FP16), largest=FP16.max)
    assert (loss.numel, loss.underflows, loss.saturated) == (6, 0, 1)
    x = torch.tensor([1.0, 1e-8, 0.0])
    loss = measure_loss(x, rounded(x, FP16))
    assert (loss.underflows, loss.saturated) == (1, 0)
    assert loss.noise == pytest.approx(1e-16, rel=1e-3)
    assert loss.sqnr_db == pytest.approx(160, abs=0.1)
    saturated = measure_loss(torch.tensor([1000.0]), rounded(torch.tensor([1000.0]), FP8_E4M3, 1.0), largest=448.0)
    assert saturated.saturated == 1


def test_sqnr_of_a_format_follows_its_mantissa() -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    found = {floats.name: measure_loss(x, rounded(x, floats)).sqnr_db for floats in (FP16, BF16, FP8_E4M3)}
    # 6.02 dB a bit; the constant is that of uniformly distributed mantissas
    assert found["bf16"] == pytest.approx(6.02 * 8 + 7, abs=1.5)
    assert found["fp16"] - found["bf16"] == pytest.approx(6.02 * 3, abs=0.5)
    assert found["bf16"] - found["fp8 e4m3"] == pytest.approx(6.02 * 4, abs=0.7)
    assert measure_loss(x, x).sqnr_db == math.inf
