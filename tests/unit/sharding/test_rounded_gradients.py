"""Sums in a BF16 main grad are exact in expectation, and follow from the step and from an element's place."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dtrain.distributed.transport.single_rank import SingleRank
from dtrain.parameters.micro_batch_weight import Weight
from dtrain.sharding import rounded_gradients
from dtrain.sharding.gradients import LocalSending
from dtrain.sharding.layout import CHUNK, ArenaSegment, ParamSpec, flat_layouts
from dtrain.sharding.rounded_gradients import RoundedSum, StepNoise

CPU = torch.device("cpu")
ONE = Weight(torch.ones(()), is_one=True)
N = 4 * CHUNK


def rounded(
    pushes: Sequence[Sequence[Tensor]], step: int = 1, weight: Weight = ONE, part: slice = slice(0, N)
) -> Tensor:
    """Returns the main grad of ``part`` after a step; it begins as NaN."""
    noise = StepNoise(CPU)
    noise.begin(step)
    main_grad = torch.full((part.stop - part.start,), math.nan, dtype=torch.bfloat16)
    total = RoundedSum(main_grad, ("blocks.0", part.start), noise)
    for left, grads in zip(reversed(range(len(pushes))), pushes, strict=True):
        total.push([grad[part] for grad in grads], [weight] * len(grads), is_last=left == 0)
    norms = total.norms
    total.finish()
    if pushes:
        expected = torch.linalg.vector_norm(main_grad.view(-1, CHUNK).float(), dim=1)
        torch.testing.assert_close(norms, expected, rtol=1e-6, atol=0.0, equal_nan=True)
    return main_grad


def constant(value: float) -> Tensor:
    return torch.full((N,), value, dtype=torch.bfloat16)


def random_pushes(number: int, ranks: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(N, generator=generator).bfloat16() for _ in range(ranks)] for _ in range(number)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_small_addends_are_not_lost_in_expectation(ranks: int) -> None:
    """BF16 numbers around 256 are 2 apart, so each addend would be lost if it were rounded to nearest."""
    pushes = [[constant(256.0)], *[[constant(0.25)] * ranks] * 64]
    exact = 256 + 64 * 0.25 * ranks
    found = rounded(pushes)
    assert found.float().mean() == pytest.approx(exact, abs=0.5)
    assert len(found.unique()) > 4


def test_a_single_gradient_is_copied() -> None:
    grads = random_pushes(1, 1)
    grads[0][0][:3] = torch.tensor([math.inf, -math.inf, -0.0])
    assert torch.equal(rounded(grads).view(torch.int16), grads[0][0].view(torch.int16))
    assert not rounded([]).any()


def test_a_weight_is_applied_before_the_rounding() -> None:
    value = 1.0 + 2**-7  # times 1.5 it lies between two BF16 numbers
    found = rounded([[constant(value)]], weight=Weight(torch.tensor(1.5)))
    assert found.float().mean() == pytest.approx(1.5 * value, rel=2e-4)
    assert len(found.unique()) == 2


def test_the_sum_of_the_ranks_is_formed_in_fp32() -> None:
    """In BF16 the first two would cancel to what the third is lost in."""
    grads = [constant(256.0), constant(0.5), constant(-256.0)]
    assert torch.equal(rounded([grads]), constant(0.5))


@pytest.mark.parametrize("cut", [CHUNK, 3 * CHUNK])
def test_any_sharding_and_any_blocks_give_the_same_bits(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pushes = random_pushes(3, 2)
    whole = rounded(pushes)
    parts = [rounded(pushes, part=part) for part in (slice(0, cut), slice(cut, N))]
    assert torch.equal(torch.cat(parts), whole)
    monkeypatch.setattr(rounded_gradients, "_BLOCK", {"cpu": 1000})
    assert torch.equal(rounded(pushes), whole)


def test_bits_follow_from_the_step_and_the_addition() -> None:
    pushes = random_pushes(2, 2)
    first = rounded(pushes, step=1)
    assert torch.equal(rounded(pushes, step=1), first)
    assert not torch.equal(rounded(pushes, step=2), first)
    nothing = [[constant(0.0), constant(0.0)]]
    assert not torch.equal(rounded([*nothing, *pushes]), first)


def test_what_is_not_finite_stays_so() -> None:
    for bad in (math.inf, -math.inf, math.nan):
        pushes = random_pushes(2, 2)
        pushes[0][1][5] = bad
        found = rounded(pushes)
        assert not found[5].isfinite()
        assert found.isfinite().sum() == N - 1


def test_bits_do_not_follow_from_the_step_before_if_the_first_micro_batch_has_no_gradient() -> None:
    """Else a run that is resumed at the second step would draw other ones."""
    grads = [grad for (grad,) in random_pushes(3, 1)]

    def second_step(*, resumed: bool) -> Tensor:
        noise, main_grad = StepNoise(CPU), torch.zeros(N, dtype=torch.bfloat16)
        (layout,) = flat_layouts("blocks.0", [ParamSpec("weight", (N,), torch.bfloat16)], 1)
        sums = [RoundedSum(main_grad, ("blocks.0", 0), noise).accumulate]
        sending = LocalSending(ArenaSegment(layout, 0, N), SingleRank(CPU), main_grad, torch.bfloat16, sums)
        if not resumed:
            noise.begin(1)
            for number, grad in enumerate(grads):
                sending.receive([0], [grad], ONE, is_first=not number)
        noise.begin(2)
        sending.receive_zeros(0, is_first=True)
        for grad in grads:
            sending.receive([0], [grad], ONE, is_first=False)
        return main_grad

    assert torch.equal(second_step(resumed=False), second_step(resumed=True))
