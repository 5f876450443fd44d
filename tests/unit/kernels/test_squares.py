from __future__ import annotations

import math

import pytest
import torch

from dtrain.sharding.layout import CHUNK

squares = pytest.importorskip("dtrain.kernels.squares", reason="Triton is not installed")


def tensors(device: torch.device, sizes: tuple[int, ...] = (1, 11, 3)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size * CHUNK, generator=generator).to(device) for size in sizes]


def expected(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.double().view(-1, CHUNK).square().sum(dim=1) for tensor in values])


def test_sums_of_chunks(device: torch.device) -> None:
    values = tensors(device)
    sums = squares.SquareSums(values, CHUNK, by_chunk=True).compute()
    assert sums.dtype == torch.float64
    torch.testing.assert_close(sums, expected(values), rtol=1e-6, atol=0.0)


def test_a_chunk_has_the_same_bits_wherever_it_lies(device: torch.device) -> None:
    values = tensors(device)
    want = squares.SquareSums(values, CHUNK, by_chunk=True).compute()
    pieces = torch.cat(values).split(2 * CHUNK)
    assert torch.equal(squares.SquareSums(pieces, CHUNK, by_chunk=True).compute(), want)


def test_bf16_tensors_lie_beside_fp32_ones(device: torch.device) -> None:
    values = tensors(device)
    values[1] = values[1].bfloat16()
    sums = squares.SquareSums(values, CHUNK, by_chunk=True).compute()
    torch.testing.assert_close(sums, expected(values), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("programs", [1, 2, 1024])
def test_the_total_is_a_few_sums(programs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(squares, "_PROGRAMS", programs)
    values = tensors(device)
    sums = squares.SquareSums(values, CHUNK, by_chunk=False).compute()
    assert len(sums) == min(programs, 4)  # tiles of 8 chunks: 1 + 2 + 1
    torch.testing.assert_close(sums.sum(), expected(values).sum(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("by_chunk", [True, False])
def test_what_is_not_finite_shows(bad: float, by_chunk: bool, device: torch.device) -> None:
    values = tensors(device)
    values[1][-1] = bad
    sums = squares.SquareSums(values, CHUNK, by_chunk=by_chunk).compute()
    assert (~sums.isfinite()).sum() == 1


@pytest.mark.parametrize("exponent", [-149, -130, -126, -100, -64, -40, 0, 40, 60, 64, 100, 125])
def test_elements_of_any_magnitude(exponent: int, device: torch.device) -> None:
    values = [tensor.mul(2.0**exponent) for tensor in tensors(torch.device("cpu"))]
    values[1][0] = 0.0 if exponent < 0 else 3e38  # one chunk has two magnitudes
    values[2].zero_()
    sums = squares.SquareSums([tensor.to(device) for tensor in values], CHUNK, by_chunk=True).compute()
    torch.testing.assert_close(sums.cpu(), expected(values), rtol=1e-6, atol=0.0)


def test_powers_of_two_round_nothing(device: torch.device) -> None:
    values = tensors(device)
    want = squares.SquareSums(values, CHUNK, by_chunk=True).compute()
    for exponent in (-90, 90):
        scaled = [tensor * 2.0**exponent for tensor in values]
        sums = squares.SquareSums(scaled, CHUNK, by_chunk=True).compute()
        assert torch.equal(sums, want * 4.0**exponent)
