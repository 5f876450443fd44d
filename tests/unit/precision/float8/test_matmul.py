"""FP8 matmuls: the emulation has the bits of ``torch.nn.functional.scaled_mm``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.precision.float8 import matmul
from dtrain.precision.float8.cast import E4M3, E5M2, Quantized, Scaling, dequantize, quantize
from dtrain.precision.float8.matmul import ALIGNMENT, multiply, operand
from dtrain.precision.hardware import has_row_scales_on_cpu
from tests.helpers import needs


def matrix(rows: int, columns: int, dtype: torch.dtype, scaling: Scaling, *, seed: int, power: int = 0) -> Quantized:
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(power - 3, power + 4, (rows, 1), generator=generator)
    return quantize(torch.randn(rows, columns, generator=generator).ldexp(powers), dtype, scaling)


UNBLOCKED = [Scaling.TENSOR, Scaling.ROWS]
BLOCKED = [(Scaling.LINES, Scaling.SQUARES), (Scaling.LINES, Scaling.LINES)]
sizes = st.tuples(st.integers(16, 70), st.integers(1, 70), st.integers(1, 300))  # torch sums fewer rows otherwise
power = st.integers(-50, 50)  # where FP32 overflows the order would matter


@settings(max_examples=40)
@given(
    sizes,
    st.sampled_from([E4M3, E5M2]),
    st.sampled_from(UNBLOCKED[: 1 + has_row_scales_on_cpu()]),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.tuples(power, power, st.integers(0, 2**31)),
)
def test_an_emulated_product_has_the_bits_of_torch(
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    scaling: Scaling,
    out_dtype: torch.dtype,
    drawn: tuple[int, int, int],
) -> None:
    (num_rows, num_columns, inner), (power, other, seed) = sizes, drawn
    left = matrix(num_rows, inner, dtype, scaling, seed=seed, power=power)
    right = matrix(num_columns, inner, E4M3, scaling, seed=seed + 1, power=other)
    emulated, real = (multiply(left, right, out_dtype, emulate=emulate) for emulate in (True, False))
    assert emulated.dtype == out_dtype
    assert emulated.shape == (num_rows, num_columns)
    torch.testing.assert_close(emulated, real, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("emulate", [True, False], ids=["emulated", "scaled_mm"])
@pytest.mark.parametrize("scalings", [(scaling, scaling) for scaling in UNBLOCKED] + BLOCKED, ids=str)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("num_rows", [0, 1, 33])
def test_multiply_agrees_with_double(
    num_rows: int, dtype: torch.dtype, scalings: tuple[Scaling, Scaling], emulate: bool
) -> None:
    """FP32 sums of n exact products: n times half an ulp of FP32 from the truth at most, and one rounding."""
    needs.products_on_cpu("rowwise" if scalings[0] is Scaling.ROWS else "tensorwise", emulate=emulate)
    if scalings in BLOCKED and not emulate:
        pytest.skip("no CPU multiplies blocks")
    inner = 300 if scalings in BLOCKED else 100  # two whole blocks and a part of one
    left = matrix(num_rows, inner, dtype, scalings[0], seed=0)
    right = matrix(150, inner, E4M3, scalings[1], seed=1)
    exact = dequantize(left).double() @ dequantize(right).double().t()
    magnitude = dequantize(left).double().abs() @ dequantize(right).double().abs().t()
    in_fp32 = multiply(left, right, torch.float32, emulate=emulate)
    assert in_fp32.shape == exact.shape
    assert ((in_fp32 - exact).abs() <= inner * 2.0**-24 * magnitude).all()
    in_bf16 = multiply(left, right, torch.bfloat16, emulate=emulate)
    assert torch.equal(in_bf16, in_fp32.bfloat16())


@settings(max_examples=25)
@given(st.tuples(st.integers(1, 300), st.integers(1, 300), st.integers(1, 500)), st.sampled_from(BLOCKED), st.data())
def test_blocks_are_multiplied_as_one_after_the_other(
    sizes: tuple[int, int, int], scalings: tuple[Scaling, Scaling], data: st.DataObject
) -> None:
    """FP32 sums of 128 products, scaled and added in order: bits of a plain loop over the blocks of numbers."""
    (num_rows, num_columns, inner), seed = sizes, data.draw(st.integers(0, 2**31))
    left = matrix(num_rows, inner, E4M3, scalings[0], seed=seed, power=data.draw(power))
    right = matrix(num_columns, inner, E4M3, scalings[1], seed=seed + 1, power=data.draw(power))
    total = torch.zeros(num_rows, num_columns)
    for start in range(0, inner, 128):
        part = slice(start, start + 128)
        other = right.scale[:, start // 128]
        other = other[torch.arange(num_columns) // (1 if scalings[1] is Scaling.LINES else 128)]
        a, b = (side.values[:, part].float() for side in (left, right))
        total += (a @ b.t()) * left.scale[:, start // 128, None] * other
    got = multiply(left, right, torch.float32, emulate=True)
    torch.testing.assert_close(got, total, rtol=2.0**-21, atol=float(total.abs().max()) * 2.0**-22, equal_nan=True)


@pytest.mark.parametrize("shape", [(16, 128, 256), (20, 300, 130), (1, 16, 16), (144, 512, 1000)])
@pytest.mark.parametrize("scalings", BLOCKED, ids=str)
def test_a_gpu_gets_blocks_as_torch_wants_them(
    shape: tuple[int, int, int], scalings: tuple[Scaling, Scaling], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's own checks of shapes and strides run on meta tensors; those of cuBLAS follow its manual."""
    real, calls = F.scaled_mm, []

    def check(
        a: torch.Tensor, b: torch.Tensor, own: torch.Tensor, kind: Any, other: torch.Tensor, *rest: Any, **how: Any
    ) -> torch.Tensor:
        calls.append((kind, rest[0]))
        assert a.shape[0] % 4 == 0
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        assert own.stride(0) == other.stride(0) == 1
        assert own.stride(1) == a.shape[0]
        assert not how["use_fast_accum"]
        real(*(tensor.to("meta") for tensor in (a, b)), own.to("meta"), kind, other.to("meta"), *rest, **how)
        return torch.zeros(a.shape[0], b.shape[1], dtype=how["output_dtype"])

    monkeypatch.setattr(F, "scaled_mm", check)
    monkeypatch.setattr(matmul, "is_fake", lambda tensor: True)  # which a CPU does not refuse
    num_rows, num_columns, inner = shape
    left = matrix(num_rows, inner, E4M3, scalings[0], seed=0)
    right = matrix(num_columns, inner, E4M3, scalings[1], seed=1)
    assert multiply(left, right, torch.bfloat16, emulate=False).shape == (num_rows, num_columns)
    kinds = {Scaling.LINES: F.ScalingType.BlockWise1x128, Scaling.SQUARES: F.ScalingType.BlockWise128x128}
    assert calls == [tuple(kinds[scaling] for scaling in scalings)]


def test_a_planted_fault_of_scales_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales in the other order in memory, and those of a transposed block, fail the tests above."""
    lines, squares = BLOCKED[::-1]
    with monkeypatch.context() as patch:
        patch.setattr(matmul, "_by_line", lambda scale, rows: F.pad(scale, (0, 0, 0, rows - len(scale))).contiguous())
        with pytest.raises((AssertionError, RuntimeError)):
            test_a_gpu_gets_blocks_as_torch_wants_them((144, 512, 1024), lines, patch)
    filled = matmul._filled
    with monkeypatch.context() as patch:
        # those of the right side, which need no rows more
        patch.setattr(matmul, "_filled", lambda own, rows: own.flip(0) if len(own) == rows else filled(own, rows))
        with pytest.raises(AssertionError):
            test_multiply_agrees_with_double(33, E4M3, squares, True)
    emulated = matmul._emulated
    with monkeypatch.context() as patch:
        patch.setattr(
            matmul, "_emulated", lambda left, right, own, other, out: emulated(left, right, own, other.t(), out)
        )
        left, right = matrix(128, 256, E4M3, Scaling.LINES, seed=0), matrix(256, 256, E4M3, Scaling.SQUARES, seed=1)
        right.scale[0, 1] *= 4
        exact = dequantize(left) @ dequantize(right).t()
        transposed = multiply(left, right, torch.float32, emulate=True)
        assert (transposed - exact).norm() > 0.5 * exact.norm()
    assert (multiply(left, right, torch.float32, emulate=True) - exact).norm() < 1e-6 * exact.norm()


@pytest.mark.parametrize("emulate", [True, False], ids=["emulated", "scaled_mm"])
def test_sums_are_fp32_under_autocast(emulate: bool) -> None:
    left, right = matrix(16, 256, E4M3, Scaling.TENSOR, seed=0), matrix(16, 256, E4M3, Scaling.TENSOR, seed=1)
    without_autocast = multiply(left, right, torch.float32, emulate=emulate)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(multiply(left, right, torch.float32, emulate=emulate), without_autocast)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("emulate", [True, False], ids=["emulated", "scaled_mm"])
def test_operand_is_padded_with_zeros_and_reusable(emulate: bool, transposed: bool) -> None:
    values = matrix(20, 50, E4M3, Scaling.TENSOR, seed=0).values
    made = operand(values, emulate=emulate, transposed=transposed)
    want = values.float().t() if transposed else values.float()
    assert all(size % ALIGNMENT == 0 for size in made.shape)
    assert torch.equal(made.float()[: want.shape[0], : want.shape[1]], want)
    assert made.float().count_nonzero() == want.count_nonzero()
    left = matrix(7, want.shape[1], E5M2, Scaling.TENSOR, seed=2)
    scale = torch.tensor(2.0)
    once = multiply(left, Quantized(made, scale), torch.bfloat16, emulate=emulate)[:, : want.shape[0]]
    plain = Quantized(want.to(E4M3), scale)
    assert torch.equal(once, multiply(left, plain, torch.bfloat16, emulate=emulate))
    fits = matrix(32, 48, E4M3, Scaling.TENSOR, seed=0).values
    assert operand(fits, emulate=False) is fits
