"""Rounding of tensors, and counts of histograms, against direct counts and the exact arithmetic of ``formats``."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtrain.precision.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, TF32, FloatFormat
from dtrain.precision.histogram import NUM_BINS, Histogram, _add_chunk, count_magnitudes, share
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


DTYPES = {FP16: torch.float16, FP8_E4M3: torch.float8_e4m3fn, FP8_E5M2: torch.float8_e5m2}
numbers = st.floats(width=32, allow_nan=True, allow_infinity=True)


def ordinary(seed: int, *, spread: float = 12.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4096, generator=generator) * torch.exp2(spread * torch.randn(4096, generator=generator))


def around_limits(floats: FloatFormat, scale: float) -> list[float]:
    limits = (floats.min_subnormal / 2, floats.min_subnormal, floats.min_normal, floats.max, 2 * floats.max)
    return [math.nextafter(limit, to) / scale if to else limit / scale for limit in limits for to in (0.0, math.inf)]


@given(st.lists(numbers, max_size=40))
def test_every_element_is_in_one_bin(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    histogram = Histogram.of(x)
    assert histogram.total == len(values)
    assert histogram.zeros == int((x == 0).sum())
    assert histogram.num_nonfinite == int((~x.isfinite()).sum())
    normal = [abs(v) for v in x.tolist() if math.isfinite(v) and abs(v) >= 2.0**-126]
    expected = max((math.frexp(value)[1] - 1 for value in normal), default=None)
    assert histogram.top_exponent == expected


@pytest.mark.parametrize("floats", DTYPES, ids=lambda f: f.name)
@pytest.mark.parametrize("power", [-3, 0, 5, 16])
def test_flushed_subnormal_and_overflowing_equal_direct_counts(floats: FloatFormat, power: int) -> None:
    scale = 2.0**power
    x = torch.cat((ordinary(power), torch.tensor(around_limits(floats, scale), dtype=torch.float32)))
    histogram, magnitude = Histogram.of(x), (x * scale).abs()
    direct = int(((magnitude.clamp(max=floats.max).to(DTYPES[floats]).float() == 0) & (x != 0)).sum())
    assert direct > 2
    assert histogram.flushed(floats, scale) == direct
    assert histogram.subnormal(floats, scale) == int(((magnitude < floats.min_normal) & (magnitude > 0)).sum())
    assert histogram.overflowing(floats, scale) == int((magnitude >= 2.0 ** (floats.max_exponent + 1)).sum())
    with pytest.raises(ValueError, match="power of two"):
        histogram.flushed(floats, 3.0)


def test_histograms_add_up_and_survive_json() -> None:
    x, y = ordinary(1), torch.tensor([0.0, math.inf, math.nan, 1e-40, 1.0])
    whole = Histogram.of(torch.cat((x, y)))
    assert Histogram.of(x) + Histogram.of(y) == whole
    assert Histogram.from_dict(whole.to_dict()) == whole
    assert sum(whole.by_exponent().values()) == whole.num_nonzero - 1  # without the subnormal one
    assert (share(0, 0), share(1, 4)) == (0.0, 0.25)


@pytest.mark.parametrize("power", [-9, 0, 17])
def test_scaled_histogram_is_that_of_the_scaled_numbers(power: int) -> None:
    x = torch.cat((ordinary(4), torch.tensor([0.0, math.inf, math.nan, 2.0**-20, -(2.0**20)])))
    assert Histogram.of(x).scaled(2.0**power) == Histogram.of(x * 2.0**power)
    # out of the normal range they are subnormal or infinite
    edges = Histogram.of(torch.tensor([2.0**-126, 2.0**127, 1e-40]))
    assert edges.scaled(0.5) == Histogram.of(torch.tensor([1e-40, 2.0**126, 1e-40]))
    assert edges.scaled(4.0) == Histogram.of(torch.tensor([2.0**-124, math.inf, 1e-40]))


def test_any_dtype_layout_and_size_is_counted_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        x = ordinary(3, spread=2.0).to(dtype)
        assert torch.equal(count_magnitudes(x), count_magnitudes(x.float()))
    x = ordinary(5).view(64, 64).t()  # not contiguous
    whole = count_magnitudes(x)
    assert whole.shape == (NUM_BINS,)
    monkeypatch.setattr("dtrain.precision.histogram._CHUNK", 100)
    assert torch.equal(count_magnitudes(x), whole)


def test_bins_in_lanes_have_the_same_counts() -> None:
    """As on a GPU, where neighbors add to different copies of a bin."""
    x, counts = ordinary(6)[:1001], torch.ones(NUM_BINS, dtype=torch.int64)
    _add_chunk(counts, x, 128)
    assert torch.equal(counts, count_magnitudes(x) + 1)
