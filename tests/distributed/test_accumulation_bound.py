"""Main grads keep the error bound of FP32 sums over micro-batches and ranks, which sums in reduced precision break.

Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., sections 3.1 and 4.2: a sum of n products rounded one
by one differs from the exact one by at most gamma(d) times the sum of the absolute values, with d = n roundings on the
longest way for a running sum and 1 + ceil(log2 n) for a balanced tree; gamma(d) = d u / (1 - d u), u = 2**-24.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import dtrain
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

NUM_MICRO_BATCHES = 5
WEIGHTS = (1.0, 3.0, 7.0, 0.1, 1000.0)
NUMEL = 3000


class Dot(nn.Module):
    """Its gradient is its input, exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(NUMEL, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.vector.float() * x).sum()


def micro_batch(number: int) -> Tensor:
    """Values of BF16 over many magnitudes and both signs, for micro-batch ``number`` of the global order."""
    generator = torch.Generator().manual_seed(number)
    values = torch.randn(NUMEL, 1, generator=generator) * 2.0 ** torch.randint(-12, 12, (NUMEL, 1), generator=generator)
    return values.bfloat16().float()


def main_grads(rank: int, world: int, stage: int, reproducible: bool) -> Tensor | None:
    engine = dtrain.initialize(Dot(), precision="bf16", zero_stage=stage, reproducible=reproducible, seed=0)
    numbers = range(rank, NUM_MICRO_BATCHES * world, world)
    for number, weight in engine.accumulate(zip(numbers, WEIGHTS, strict=True)):
        engine.backward(engine(micro_batch(number)), weight=weight)
    engine.finish_gradients()  # type: ignore[attr-defined]
    full = [grad.clone() for _, grad in engine.full_state("main_grad")]  # type: ignore[attr-defined]
    engine.step()
    return full[0] if rank == 0 else None


def bound(depth: int) -> float:
    return depth * 2.0**-24 / (1 - depth * 2.0**-24)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_error_stays_under_the_bound(world: int) -> None:
    number = NUM_MICRO_BATCHES * world
    terms = torch.stack([micro_batch(n).double() * float(torch.tensor(WEIGHTS[n // world])) for n in range(number)])
    exact, size = terms.sum(dim=0), terms.abs().sum(dim=0)
    for stage in (0, 1, 2, 3):
        got = run_ranks(world, main_grads, stage, False)[0]
        assert ((got.double() - exact).abs() <= bound(number) * size).all(), f"stage {stage}"
    got = run_ranks(world, main_grads, 2, True)[0]
    depth = 1 + math.ceil(math.log2(number))
    assert ((got.double() - exact).abs() <= bound(depth) * size).all(), "canonical tree"
    reduced = torch.zeros(NUMEL, 1, dtype=torch.bfloat16)
    for n in range(number):
        reduced += (micro_batch(n) * WEIGHTS[n // world]).bfloat16()
    assert ((reduced.double() - exact).abs() > bound(number) * size).float().mean() > 0.9, "the control"
