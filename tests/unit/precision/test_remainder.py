"""FP32 numbers as pairs are exact, and the BF16 half is the nearest number, by every pattern at the boundaries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtrain.precision import remainder
from dtrain.precision.remainder import RemainderPair, join, split

UPPER = torch.arange(1 << 16, dtype=torch.int32) << 16
"""Every upper half: all signs, exponents and leading digits, so also 0, -0, subnormal numbers, Inf and NaN."""

LOWER = (0, 1, 2, 0x1234, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xABCD, 0xFFFE, 0xFFFF)
TIE = 0x8000


def pair_of(values: Tensor) -> RemainderPair:
    pair = RemainderPair(
        torch.full(values.shape, 7.0, dtype=torch.bfloat16), torch.full(values.shape, 7, dtype=torch.int16)
    )
    pair.write(values)
    return pair


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int16 if values.dtype == torch.bfloat16 else torch.int32)


@pytest.mark.parametrize("lower", LOWER)
def test_every_upper_half_is_exact(lower: int) -> None:
    values = (UPPER | lower).view(torch.float32)
    pair = pair_of(values)
    is_nan = values.isnan()
    assert torch.equal(bits(pair.read())[~is_nan], bits(values)[~is_nan])
    assert pair.read()[is_nan].isnan().all()
    assert pair.weight[is_nan].isnan().all()
    differs = (bits(pair.weight) != bits(values.bfloat16())) & ~is_nan
    # only at a tie next to an even number, where the cast takes the even one and the pair the larger magnitude
    finite = values.isfinite()
    assert torch.equal(differs, finite & ((UPPER >> 16) % 2 == 0) if lower == TIE else torch.zeros_like(differs))
    nearest = pair.weight.double()
    assert torch.equal((nearest - values.double()).abs()[differs], (values.bfloat16().double() - values).abs()[differs])


def test_blocks_and_the_search_for_nan_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.cat([UPPER | lower for lower in LOWER]).view(torch.float32)
    want = split(values)
    for block in (1 << 12, 1 << 20):  # most of the former are finite, the latter is not
        monkeypatch.setattr(remainder, "_BLOCK", {"cpu": block})
        pair = pair_of(values)
        assert all(torch.equal(own, other) for own, other in zip(pair.bits, want, strict=True))
        assert torch.equal(bits(pair.read()), bits(join(*want)))


@settings(max_examples=60)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), st.data())
def test_any_numbers_and_any_part(patterns: list[int], data: st.DataObject) -> None:
    values = torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)
    values = torch.where(values.isnan(), torch.nan, values)  # the one that a pair holds
    pair = pair_of(values)
    assert torch.equal(bits(pair.read()), bits(values))
    start = data.draw(st.integers(0, len(patterns)))
    part = slice(start, data.draw(st.integers(start, len(patterns))))
    pair[part].write(torch.zeros_like(values[part]))
    values[part] = 0.0
    assert torch.equal(bits(pair.read()), bits(values))
