"""FP8 matmuls: the emulation has the bits of ``torch._scaled_mm``."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.precision.float8.cast import E4M3, E5M2, Quantized, dequantize, quantize
from dtrain.precision.float8.matmul import ALIGNMENT, multiply, operand
from dtrain.precision.hardware import has_row_scales_on_cpu
from tests.helpers import needs


def matrix(rows: int, columns: int, dtype: torch.dtype, *, rowwise: bool, seed: int, power: int = 0) -> Quantized:
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(power - 3, power + 4, (rows, 1), generator=generator)
    return quantize(torch.randn(rows, columns, generator=generator).ldexp(powers), dtype, rowwise=rowwise)


sizes = st.tuples(st.integers(16, 70), st.integers(1, 70), st.integers(1, 300))  # torch sums fewer rows otherwise
power = st.integers(-50, 50)  # where FP32 overflows the order would matter


@settings(max_examples=40)
@given(
    sizes,
    st.sampled_from([E4M3, E5M2]),
    st.sampled_from([False, True][: 1 + has_row_scales_on_cpu()]),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.tuples(power, power, st.integers(0, 2**31)),
)
def test_an_emulated_product_has_the_bits_of_torch(
    sizes: tuple[int, int, int], dtype: torch.dtype, rowwise: bool, out_dtype: torch.dtype, drawn: tuple[int, int, int]
) -> None:
    (num_rows, num_columns, inner), (power, other, seed) = sizes, drawn
    left = matrix(num_rows, inner, dtype, rowwise=rowwise, seed=seed, power=power)
    right = matrix(num_columns, inner, E4M3, rowwise=rowwise, seed=seed + 1, power=other)
    emulated, real = (multiply(left, right, out_dtype, emulate=emulate) for emulate in (True, False))
    assert emulated.dtype == out_dtype
    assert emulated.shape == (num_rows, num_columns)
    torch.testing.assert_close(emulated, real, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("emulate", [True, False], ids=["emulated", "scaled_mm"])
@pytest.mark.parametrize("rowwise", [False, True], ids=["tensorwise", "rowwise"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("num_rows", [0, 1, 33])
def test_multiply_agrees_with_double(num_rows: int, dtype: torch.dtype, rowwise: bool, emulate: bool) -> None:
    """FP32 sums of 100 exact products: 100 times half an ulp of FP32 from the truth at most, and one rounding."""
    needs.row_scales_on_cpu(rowwise=rowwise, emulate=emulate)
    left = matrix(num_rows, 100, dtype, rowwise=rowwise, seed=0)
    right = matrix(17, 100, E4M3, rowwise=rowwise, seed=1)
    exact = dequantize(left).double() @ dequantize(right).double().t()
    magnitude = dequantize(left).double().abs() @ dequantize(right).double().abs().t()
    in_fp32 = multiply(left, right, torch.float32, emulate=emulate)
    assert ((in_fp32 - exact).abs() <= 100 * 2.0**-24 * magnitude).all()
    in_bf16 = multiply(left, right, torch.bfloat16, emulate=emulate)
    assert torch.equal(in_bf16, in_fp32.bfloat16())


@pytest.mark.parametrize("emulate", [True, False], ids=["emulated", "scaled_mm"])
def test_sums_are_fp32_under_autocast(emulate: bool) -> None:
    left, right = matrix(16, 256, E4M3, rowwise=False, seed=0), matrix(16, 256, E4M3, rowwise=False, seed=1)
    without_autocast = multiply(left, right, torch.float32, emulate=emulate)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(multiply(left, right, torch.float32, emulate=emulate), without_autocast)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("emulate", [True, False], ids=["emulated", "scaled_mm"])
def test_operand_is_padded_with_zeros_and_reusable(emulate: bool, transposed: bool) -> None:
    values = matrix(20, 50, E4M3, rowwise=False, seed=0).values
    made = operand(values, emulate=emulate, transposed=transposed)
    want = values.float().t() if transposed else values.float()
    assert all(size % ALIGNMENT == 0 for size in made.shape)
    assert torch.equal(made.float()[: want.shape[0], : want.shape[1]], want)
    assert made.float().count_nonzero() == want.count_nonzero()
    left = matrix(7, want.shape[1], E5M2, rowwise=False, seed=2)
    scale = torch.tensor(2.0)
    once = multiply(left, Quantized(made, scale), torch.bfloat16, emulate=emulate)[:, : want.shape[0]]
    plain = Quantized(want.to(E4M3), scale)
    assert torch.equal(once, multiply(left, plain, torch.bfloat16, emulate=emulate))
    fits = matrix(32, 48, E4M3, rowwise=False, seed=0).values
    assert operand(fits, emulate=False) is fits
