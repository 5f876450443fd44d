"""The moving average by a Triton kernel: the bits of the tensor code, of whatever segments a call has."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dtrain.optim.average import MovingAverage
from dtrain.optim.rule import UpdateScalars

tiled = pytest.importorskip("dtrain.optim.tiled_average", reason="Triton is not installed")

NUMELS = (1024, 5 * 1024, 2048)


def segments(device: torch.device) -> list[list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(n, generator=generator), torch.randn(n, generator=generator)) for n in NUMELS]
    return [[(master.to(device), average.to(device))] for master, average in pairs]


def averages(of: list[list[tuple[Tensor, Tensor]]]) -> Tensor:
    return torch.cat([average for segment in of for _, average in segment]).cpu()


@pytest.mark.parametrize("calls", [[[0, 1, 2]], [[0], [1, 2]], [[0, 2], [1]]])
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
    kernel = tiled.TiledAverage(0.9, parts)
    code, divisor = (torch.tensor(value, dtype=torch.float64, device=device) for value in (2.0, 1.0))
    kernel.update([0, 1, 2], UpdateScalars(0.1, 1, grad_divisor=divisor, found_inf=code))
    assert torch.equal(averages(parts), averages(segments(device)))


def test_a_rank_may_have_no_segments() -> None:
    one = torch.ones((), dtype=torch.float64)
    tiled.TiledAverage(0.9, []).update([], UpdateScalars(0.1, 1, grad_divisor=one, found_inf=one))
