"""Scales and casts: the smallest power of two that fits, nothing saturated, and no Inf or NaN that a cast hides."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtrain.precision.float8 import cast as casts
from dtrain.precision.float8 import proof
from dtrain.precision.float8.cast import E4M3, E5M2, Quantized, Scaling, decode, dequantize, quantize, scale_of, spread
from dtrain.precision.hardware import has_compiler

FORMATS = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
# half the distance to the next number: of a normal number, as a part of it; and of the smallest ones
HALF_ULP = {E4M3: 2.0**-4, E5M2: 2.0**-3}
HALF_SPACING = {E4M3: 2.0**-10, E5M2: 2.0**-17}
dtypes = st.sampled_from([E4M3, E5M2])
scalings = st.sampled_from(Scaling)
non_finite = st.sampled_from([math.inf, -math.inf, math.nan, math.copysign(math.nan, -1.0)])


def same(left: Quantized, right: Quantized) -> bool:
    """Bit for bit, but for the sign and payload of NaN."""
    pairs = ((left.values.float(), right.values.float()), (left.scale, right.scale))
    return all(torch.equal(a.nan_to_num(nan=-1.25), b.nan_to_num(nan=-1.25)) for a, b in pairs)


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Any size, strides and dtype; magnitudes over all of FP32, denormals too, and zeros."""
    rows, columns = (draw(st.one_of(st.integers(1, 9), st.integers(120, 260))) for _ in range(2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    low, spread = draw(st.integers(-149, 100)), draw(st.integers(0, 25))
    powers = torch.randint(low, low + spread + 1, (2 * rows, 2 * columns), generator=generator)
    x = torch.randn(2 * rows, 2 * columns, generator=generator).ldexp(powers)
    x[torch.rand(x.shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = 0.0
    x = x.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))
    views = {
        "dense": x[:rows, :columns].clone(),
        "transposed": x[:rows, :columns].t(),
        "strided": x[::2, 1::2],
        "one row": x[:1, :columns].expand(rows, columns),
        "one column": x[:rows, :1].expand(rows, columns),
    }
    return views[draw(st.sampled_from(sorted(views)))]


@settings(max_examples=100)
@given(st.floats(0, width=32, exclude_min=True, allow_infinity=False, allow_nan=False), dtypes)
def test_a_scale_is_the_smallest_power_of_two_that_fits(amax: float, dtype: torch.dtype) -> None:
    scale = scale_of(torch.tensor(amax), dtype)
    assert scale.dtype == torch.float32
    assert math.frexp(scale.item())[0] == 0.5
    assert amax / scale.item() <= LARGEST[dtype]
    assert amax / (scale.item() / 2) > LARGEST[dtype] or scale.item() == 2.0**-126


@FORMATS
def test_scales_of_zero_and_of_non_finite_values(dtype: torch.dtype) -> None:
    """A NaN has a sign, and compiled code gives it one."""
    assert scale_of(torch.tensor([0.0, -0.0]), dtype).tolist() == [1.0, 1.0]
    values = torch.tensor([math.inf, math.nan, math.nan])
    values[2].neg_()
    assert torch.signbit(values[2])
    assert scale_of(values, dtype).isnan().all()


def blocks_of(shape: torch.Size, scaling: Scaling) -> list[list[tuple[slice, slice]]]:
    """The blocks of a matrix that share a scale, row of blocks by row, in the plainest way."""
    sides = [side or max(size, 1) for side, size in zip(scaling.value, shape, strict=True)]
    starts = [range(0, size, side) for side, size in zip(sides, shape, strict=True)]
    return [[(slice(i, i + sides[0]), slice(j, j + sides[1])) for j in starts[1]] for i in starts[0]]


@settings(max_examples=100)
@given(matrices(), dtypes, scalings)
def test_a_cast_has_the_bits_of_one_block_after_the_other(x: Tensor, dtype: torch.dtype, scaling: Scaling) -> None:
    matrix = quantize(x, dtype, scaling)
    blocks = blocks_of(x.shape, scaling)
    scales = torch.tensor([[scale_of(x[block].float().abs().max(), dtype).item() for block in row] for row in blocks])
    shape = {Scaling.TENSOR: (), Scaling.ROWS: (len(x),)}.get(scaling, tuple(scales.shape))
    assert torch.equal(matrix.scale, scales.view(shape))
    for row, of_row in zip(blocks, scales, strict=True):
        for block, scale in zip(row, of_row, strict=True):
            limit = LARGEST[dtype]
            want = (x[block].double() / scale.double()).clamp(-limit, limit).float().to(dtype)
            assert torch.equal(matrix.values[block].view(torch.uint8), want.view(torch.uint8))
    assert matrix.values.is_contiguous()
    assert scaling is not Scaling.LINES or matrix.scale.t().is_contiguous()
    traced = casts.quantize(x, dtype, scaling, traced=True)
    assert same(traced, matrix)


@settings(max_examples=60)
@given(matrices(), dtypes, scalings)
def test_a_cast_rounds_and_saturates_nothing(x: Tensor, dtype: torch.dtype, scaling: Scaling) -> None:
    matrix = quantize(x, dtype, scaling)
    assert matrix.values.dtype == dtype
    scale = spread(matrix.scale, x.shape).double()
    error = (matrix.values.double() * scale - x.double()).abs()
    assert (error <= torch.maximum(x.double().abs() * HALF_ULP[dtype], scale * HALF_SPACING[dtype])).all()
    rows, columns = proof.quantize(x, dtype, scaling, both=True, compiled=False)
    assert same(rows, matrix)
    assert same(columns, quantize(x.t(), dtype, scaling))
    assert columns.values.is_contiguous()
    once = dequantize(matrix)
    again = dequantize(quantize(once, dtype, scaling))
    assert torch.equal(again, once), "a copy of an FP8 module computes with the numbers of the original"


@settings(max_examples=50)
@given(matrices(), dtypes, scalings, non_finite, st.data())
def test_a_non_finite_value_makes_its_scale_nan(
    x: Tensor, dtype: torch.dtype, scaling: Scaling, bad: float, data: st.DataObject
) -> None:
    place = tuple(data.draw(st.integers(0, size - 1)) for size in x.shape)
    x = x.contiguous()
    x[place] = bad
    matrix = quantize(x, dtype, scaling)
    for block in itertools.chain(*blocks_of(x.shape, scaling)):
        is_poisoned = all(span.start <= number < span.stop for span, number in zip(block, place, strict=True))
        assert matrix.values[block].float().isnan().all() == is_poisoned
        assert spread(matrix.scale, x.shape).expand(x.shape)[block].isnan().all() == is_poisoned


@pytest.mark.parametrize("scaling", Scaling)
def test_gradients_of_zeros_have_finite_scales(scaling: Scaling) -> None:
    """As of a micro-batch whose tokens are all masked."""
    for matrix in proof.quantize(torch.zeros(130, 200).bfloat16(), E5M2, scaling, both=True, compiled=False):
        assert (matrix.scale == 1.0).all()
        assert not matrix.values.float().any()


@pytest.mark.parametrize("power", [10, 16])
def test_blocks_keep_an_outlier_to_themselves(power: int) -> None:
    """One number far above the others costs all their digits under one scale, and in blocks those of its own block."""
    x = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(0))
    x[100, 200] = 448.0 * 2.0**power  # exact in FP8

    def error(scaling: Scaling) -> float:
        return float((dequantize(quantize(x, E4M3, scaling)) - x).norm())

    assert error(Scaling.LINES) < error(Scaling.TENSOR) / 16
    assert error(Scaling.SQUARES) < error(Scaling.TENSOR) / 8


@FORMATS
def test_a_cast_with_a_small_scale_saturates(dtype: torch.dtype) -> None:
    """E5M2 has Inf, and must not make it of a finite number."""
    largest = LARGEST[dtype]
    values = casts.cast(torch.tensor([1.0, 2.5, 1e9, -1e9]) * largest, torch.tensor(2.0), dtype)
    assert values.float().tolist() == [largest / 2, largest, largest, -largest]
    assert casts.cast(torch.tensor([1.0, math.inf]), torch.tensor(math.nan), dtype).float().isnan().all()


@FORMATS
def test_every_number_of_a_format_is_decoded_exactly(dtype: torch.dtype) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(dtype).view(16, 16)
    for view in (values, values.t(), values[:0]):
        torch.testing.assert_close(decode(view), view.float(), rtol=0, atol=0, equal_nan=True)
    for empty in (torch.empty(0, 4), torch.empty(0, 0)):
        assert quantize(empty, dtype, Scaling.TENSOR).scale == 1.0
        for scaling in Scaling:
            assert quantize(empty, dtype, scaling).scale.shape == scaling.shape(*empty.shape)


@pytest.mark.compile
@pytest.mark.skipif(not has_compiler(torch.device("cpu")), reason="no C++ compiler")
def test_compiled_casts_have_the_bits_of_eager_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 48, generator=generator).bfloat16()
    wide = x.float().ldexp(torch.randint(-120, 90, x.shape, generator=generator)).bfloat16()
    bad = x.clone()
    bad[3, 4], bad[5, 6] = math.nan, math.inf
    for matrix in (x, wide, bad, torch.zeros_like(x)):
        for scaling in Scaling:
            values = torch.compile(partial(casts.quantized_both, traced=True))(matrix, E4M3, scaling)
            compiled = [Quantized(*values[:2]), Quantized(*values[2:])]
            eager = proof.quantize(matrix, E4M3, scaling, both=True, compiled=False)
            assert all(same(*pair) for pair in zip(compiled, eager, strict=True))
            assert compiled[1].values.is_contiguous()
