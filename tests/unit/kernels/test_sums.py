"""Kernels that sum: squares, rows of received gradients, and the moving average, against tensor code."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dtrain.optim.average import MovingAverage
from dtrain.optim.rule import UpdateScalars
from dtrain.parameters.micro_batch_weight import Weight
from dtrain.sharding.accumulate import RunningSum
from dtrain.sharding.layout import CHUNK
from dtrain.sharding.rounded_gradients import RoundedSum, StepNoise

squares = pytest.importorskip("dtrain.kernels.squares", reason="Triton is not installed")


def tensors(device: torch.device, sizes: tuple[int, ...] = (1, 11, 3)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size * CHUNK, generator=generator).to(device) for size in sizes]


def expected(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.double().view(-1, CHUNK).square().sum(dim=1) for tensor in values])


def test_a_chunk_has_the_same_bits_wherever_it_lies(device: torch.device) -> None:
    values = tensors(device)
    want = squares.SquareSums(values, CHUNK, by_chunk=True).compute()
    assert want.dtype == torch.float64
    for exponent in (-90, 90):  # powers of two round nothing
        scaled = squares.SquareSums([tensor * 2.0**exponent for tensor in values], CHUNK, by_chunk=True).compute()
        assert torch.equal(scaled, want * 4.0**exponent)
    pieces = torch.cat(values).split(2 * CHUNK)
    assert torch.equal(squares.SquareSums(pieces, CHUNK, by_chunk=True).compute(), want)
    values[1] = values[1].bfloat16()  # beside tensors of FP32
    sums = squares.SquareSums(values, CHUNK, by_chunk=True).compute()
    torch.testing.assert_close(sums, expected(values), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("programs", [1, 2, 1024])
def test_the_total_is_a_few_sums(programs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(squares, "_PROGRAMS", programs)
    values = tensors(device)
    sums = squares.SquareSums(values, CHUNK, by_chunk=False).compute()
    assert len(sums) == min(programs, 4)  # tiles of 8 chunks: 1 + 2 + 1
    torch.testing.assert_close(sums.sum(), expected(values).sum(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("by_chunk", [True, False])
def test_what_is_not_finite_shows(bad: float, by_chunk: bool, device: torch.device) -> None:
    values = tensors(device)
    values[1][-1] = bad
    sums = squares.SquareSums(values, CHUNK, by_chunk=by_chunk).compute()
    assert (~sums.isfinite()).sum() == 1


@pytest.mark.parametrize("exponent", [-149, -126, -64, 0, 64, 125])
def test_elements_of_any_magnitude(exponent: int, device: torch.device) -> None:
    values = [tensor.mul(2.0**exponent) for tensor in tensors(torch.device("cpu"))]
    values[1][0] = 0.0 if exponent < 0 else 3e38  # one chunk has two magnitudes
    values[2].zero_()
    sums = squares.SquareSums([tensor.to(device) for tensor in values], CHUNK, by_chunk=True).compute()
    torch.testing.assert_close(sums.cpu(), expected(values), rtol=1e-6, atol=0.0)


pytest.importorskip("dtrain.kernels.rows", reason="Triton is not installed")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("ranks", [2, 5])
def test_a_matrix_is_summed_as_its_rows(ranks: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(ranks)
    numel = 2048 + 64
    weights = [Weight(torch.tensor(0.5 + rank, device=device)) for rank in range(ranks)]
    rows, whole = (torch.full((numel + 64,), math.nan, device=device) for _ in range(2))
    by_rows, at_once = RunningSum(rows[:numel]), RunningSum(whole[:numel])
    by_rows._adds_rows, at_once._adds_rows = False, True
    for _ in range(2):  # the second step overwrites the first
        for _ in range(3):
            matrix = torch.randn(ranks, numel, generator=generator).to(device, dtype)
            by_rows.push(matrix.unbind(), weights)
            at_once.push(matrix.unbind(), weights)
        by_rows.finish()
        at_once.finish()
    torch.testing.assert_close(whole[:numel], rows[:numel], rtol=1e-5, atol=1e-5)
    assert whole[numel:].isnan().all()


@pytest.mark.parametrize("ranks", [1, 3])
def test_sums_are_rounded_as_by_tensor_code(ranks: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(ranks)
    numel = 3 * 1024
    noise = StepNoise(device)
    noise.begin(3)
    weights = [Weight(torch.ones((), device=device)) for _ in range(ranks)]
    found = []
    for uses_kernel in (False, True):
        generator.manual_seed(ranks)
        main_grad = torch.full((numel + 64,), math.nan, dtype=torch.bfloat16, device=device)
        total = RoundedSum(main_grad[:numel], ("blocks", 2048), noise)
        total._uses_kernel = uses_kernel
        for _ in range(3):
            total.push(torch.randn(ranks, numel, generator=generator).to(device, torch.bfloat16).unbind(), weights)
        assert main_grad[numel:].isnan().all()
        found.append(main_grad[:numel].view(torch.int16))
    assert torch.equal(*found)


tiled = pytest.importorskip("dtrain.optim.tiled_average", reason="Triton is not installed")

NUMELS = (1024, 5 * 1024, 2048)


def segments(device: torch.device) -> list[list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(n, generator=generator), torch.randn(n, generator=generator)) for n in NUMELS]
    return [[(master.to(device), average.to(device))] for master, average in pairs]


def averages(of: list[list[tuple[Tensor, Tensor]]]) -> Tensor:
    return torch.cat([average for segment in of for _, average in segment]).cpu()


@pytest.mark.parametrize("calls", [[[0, 1, 2]], [[0, 2], [1]]])
def test_has_the_bits_of_the_tensor_code(calls: list[list[int]], device: torch.device) -> None:
    got, want = segments(device), segments(torch.device("cpu"))
    kernel, tensor_code = tiled.TiledAverage(0.9, got), MovingAverage(0.9, want)
    assert torch.equal(averages(got), averages(want)), "building it changes nothing"
    for step in range(1, 4):
        for numbers in calls:
            for update, where in ((kernel, device), (tensor_code, torch.device("cpu"))):
                one, zero = (torch.tensor(value, dtype=torch.float64, device=where) for value in (1.0, 0.0))
                update.update(numbers, UpdateScalars(0.1, step, grad_divisor=one, found_inf=zero))
    assert torch.equal(averages(got), averages(want))
    assert not torch.equal(averages(got), averages(segments(device)))


def test_a_skipped_step_keeps_every_bit(device: torch.device) -> None:
    parts = segments(device)
    parts[0][0][0][7] = math.inf
    code, divisor = (torch.tensor(value, dtype=torch.float64, device=device) for value in (2.0, 1.0))
    skipped = UpdateScalars(0.1, 1, grad_divisor=divisor, found_inf=code)
    tiled.TiledAverage(0.9, parts).update([0, 1, 2], skipped)
    assert torch.equal(averages(parts), averages(segments(device)))
    tiled.TiledAverage(0.9, []).update([], skipped)
