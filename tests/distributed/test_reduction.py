"""Sums of gradients: addends are rounded to the reduce dtype, sums over micro-batches and ranks are FP32's.

Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., sections 3.1 and 4.2: a sum of n products rounded one
by one differs from the exact one by at most gamma(d) times the sum of the absolute values, with d = n roundings on the
longest way for a running sum and 1 + ceil(log2 n) for a balanced tree; gamma(d) = d u / (1 - d u), u = 2**-24.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.errors import ConfigError
from tests.helpers.net import Net
from tests.helpers.ranks import run_ranks


def dot(numel: int) -> nn.Module:
    """The gradient of its weight is its input, exactly."""
    return Net(
        lambda net, x: (net.vector * x.to(net.vector.dtype)).float().sum(), vector=nn.Parameter(torch.zeros(numel))
    )


def main_grad(inputs: list[tuple[Tensor, float]], **options: Any) -> tuple[str, Tensor]:
    """The reduce dtype of the contract, and the reduced gradient of this rank's weighted ``inputs``."""
    engine: Any = dtrain.initialize(dot(len(inputs[0][0])), seed=0, **options)
    for x, weight in engine.accumulate(inputs):
        engine.backward(engine(x), weight=weight)
    engine.finish_gradients()
    ((_, gradient),) = engine.states.full_state("main_grad")
    return engine.contract.to_dict()["reduce"], gradient.clone()


NUM_MICRO_BATCHES = 5
WEIGHTS = (1.0, 3.0, 7.0, 0.1, 1000.0)
NUMEL = 3000
UNIT = 2.0**-24 * (1 + 1e-5)  # for depths below 100, d u / (1 - d u) is less than d times this
SETTINGS = [(0, False), (1, False), (3, False), (2, True)]
"""Stages, and whether they are reproducible."""


def micro_batch(number: int) -> Tensor:
    """Values of BF16 over many magnitudes and both signs, for micro-batch ``number`` of the global order."""
    generator = torch.Generator().manual_seed(number)
    values = torch.randn(NUMEL, generator=generator) * 2.0 ** torch.randint(-12, 12, (NUMEL,), generator=generator)
    return values.bfloat16().float()


def main_grads(rank: int, world: int) -> list[Tensor]:
    own = [micro_batch(number) for number in range(rank, NUM_MICRO_BATCHES * world, world)]
    inputs = list(zip(own, WEIGHTS, strict=True))
    return [main_grad(inputs, precision="bf16", zero_stage=s, reproducible=same)[1] for s, same in SETTINGS]


@pytest.mark.processes
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_the_error_stays_under_the_bound(world: int) -> None:
    number = NUM_MICRO_BATCHES * world
    terms = torch.stack([micro_batch(n).double() * float(torch.tensor(WEIGHTS[n // world])) for n in range(number)])
    exact, size = terms.sum(dim=0), terms.abs().sum(dim=0)
    for (stage, reproducible), got in zip(SETTINGS, run_ranks(world, main_grads)[0], strict=True):
        depth = 1 + math.ceil(math.log2(number)) if reproducible else number  # of the canonical tree
        assert ((got.double() - exact).abs() <= depth * UNIT * size).all(), (stage, reproducible)
    reduced = torch.zeros(NUMEL, dtype=torch.bfloat16)
    for n in range(number):
        reduced += (micro_batch(n) * WEIGHTS[n // world]).bfloat16()
    assert ((reduced.double() - exact).abs() > number * UNIT * size).float().mean() > 0.9, "the control"


GRADIENTS = [256.0, *[1.0] * 7]  # BF16 holds 256 and 1, but 256 + 1 is 256 there
SUMS = [
    # stage, precision, reduce dtype, the contract's, sum
    (2, "bf16", "auto", "bf16", 263.0),
    (3, "bf16", "auto", "bf16", 263.0),
    (0, "bf16", "auto", "fp32", 263.0),
    (2, "bf16", "fp32", "fp32", 263.0),
    # rank 0's 256 + 1 + 1 + 1 is rounded once, to 260; with every sum in BF16 it would be 256, and 260 in all
    (0, "bf16", "bf16", "bf16", 264.0),
    (1, "bf16", "bf16", "bf16", 264.0),
    (2, "fp32", "bf16", "bf16", 263.0),
    (1, "fp16", "fp16", "fp16", 263.0),
]


def summed(rank: int, world: int, settings: list[tuple[int, str, str]]) -> list[tuple[str, list[float]]]:
    """The contract's dtype, and the sum of `GRADIENTS`, which are dealt to the ranks round-robin."""
    inputs = [(torch.full((8,), value), 1.0) for value in GRADIENTS[rank::world]]
    found = [main_grad(inputs, zero_stage=s, precision=p, reduce_dtype=d, loss_scale=1.0) for s, p, d in settings]
    return [(said, gradient.tolist()) for said, gradient in found]


@pytest.mark.processes
def test_partial_sums_are_fp32() -> None:
    want = [(said, [total] * 8) for *_, said, total in SUMS]
    assert run_ranks(2, summed, [(stage, precision, dtype) for stage, precision, dtype, *_ in SUMS]) == [want] * 2
    # small leaves of many ranks are not lost, as every 1 that is added to 256 in BF16
    assert run_ranks(4, summed, [(2, "bf16", "bf16")]) == [[("bf16", [263.0] * 8)]] * 4


def test_a_senseless_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="loses three bits of each"):
        dtrain.initialize(dot(8), precision="fp16", reduce_dtype="bf16", seed=0)
