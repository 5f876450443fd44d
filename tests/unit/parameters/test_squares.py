"""Sums of squares against FP64, over the whole range of FP32."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.parameters import squares
from dtrain.parameters.squares import _BLOCK, chunk_squares, sum_squares

CHUNK = 1024
exponents = st.integers(-149, 125)


def values(pairs: list[tuple[int, int]]) -> torch.Tensor:
    """Returns FP32 [chunks, CHUNK]; the elements of a chunk have the magnitudes of its pair of exponents."""
    noise = torch.randn(len(pairs), CHUNK, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    powers = torch.tensor(pairs, dtype=torch.float64).exp2().repeat(1, CHUNK // 2)
    return (noise * powers).clamp(-3e38, 3e38).float()


RTOL = 64 * 2.0**-24  # a lane of 16 adds 64 of the 1,024 squares one after the other, each with an error of 2^-24


@settings(max_examples=15)
@given(st.lists(st.tuples(exponents, exponents), min_size=1, max_size=5))
def test_any_magnitudes(pairs: list[tuple[int, int]]) -> None:
    chunks = values(pairs)
    want = chunks.double().square().sum(dim=1)
    torch.testing.assert_close(chunk_squares([chunks]), want, rtol=RTOL, atol=0.0)
    torch.testing.assert_close(sum_squares([chunks.view(-1)[:-7]]).sum(), chunks.view(-1)[:-7].double().square().sum(),
                               rtol=RTOL, atol=0.0)  # fmt: skip
    torch.testing.assert_close(chunk_squares([chunks], each=False).sum(), want.sum(), rtol=RTOL, atol=0.0)
    # each by itself, and with the norms known
    assert torch.equal(torch.cat([chunk_squares([chunk.unsqueeze(0)]) for chunk in chunks]), chunk_squares([chunks]))
    norms = [part.norm(dim=1) for part in chunks.split(2)]
    assert torch.equal(chunk_squares(chunks.split(2), norms), chunk_squares([chunks]))


@pytest.mark.parametrize(("bad", "exponent"), [(math.inf, 100), (-math.inf, 0), (math.nan, -100)])
def test_what_is_not_finite_shows(bad: float, exponent: int) -> None:
    chunks = values([(exponent, exponent)] * 3)
    chunks[1, 5] = bad
    assert chunk_squares([chunks]).isfinite().tolist() == [True, False, True]
    assert not sum_squares([chunks.view(-1)]).isfinite().all()


def test_zeros_and_no_elements() -> None:
    rows = 2 * _BLOCK // CHUNK + 1
    chunks = torch.zeros(rows, CHUNK)
    chunks[-1, 0] = 2.0**-140
    assert chunk_squares([chunks]).tolist() == [0.0] * (rows - 1) + [4.0**-140]
    assert sum_squares([torch.zeros(0)]).tolist() == [0.0]


def test_chunks_that_do_not_show_in_the_sum_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = values([(-20, -20), (-140, -140), (-60, -60)])
    chunks[2] = 0.0
    exact = chunk_squares([chunks])
    with monkeypatch.context() as patch:
        patch.setattr(squares, "_stretch", lambda *_: pytest.fail("a chunk was read again"))
        assert chunk_squares([chunks], each=False).sum() == exact.sum()
    assert torch.equal(chunk_squares([chunks[1:]], each=False), exact[1:]), "they are all that there is"


@pytest.mark.parametrize("numel", [1, 7, 8, 21])
def test_every_element_counts(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(squares, "_ROW", 8)
    tensors = [torch.arange(1.0, numel + 1), torch.zeros(0), torch.full((9,), 2.0)]
    sums = sum_squares(tensors)
    assert len(sums) == -(-numel // 8) + 2, "one for each row"
    assert sums.sum().item() == pytest.approx(sum(n * n for n in range(1, numel + 1)) + 36)
