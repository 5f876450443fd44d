"""Divisors of the main grads beyond FP32, under every optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtrain.optim.rule import UpdateScalars
from tests.helpers.arena import DECAYED, Arena
from tests.unit.optim.test_rules import EVERY


def scalars(step: int, divisor: float, found_inf: float = 0.0) -> UpdateScalars:
    return UpdateScalars(0.01, step, *torch.tensor([divisor, found_inf], dtype=torch.float64).unbind())


@pytest.mark.parametrize("exponent", [-126, -99, 0, 100, 101, 120])
@pytest.mark.parametrize("record", EVERY.values(), ids=EVERY)
def test_gradient_and_divisor_may_have_any_magnitude(record: Any, exponent: int) -> None:
    arenas = [Arena(record, [DECAYED] * 2) for _ in range(2)]
    optimizers = [arena.optimizer() for arena in arenas]
    for step in (1, 2):
        for power, arena, optimizer in zip((0, exponent), arenas, optimizers, strict=True):
            # few bits, so that none is lost where the gradient is subnormal
            arena.main_grad.copy_((arena.new_gradient() * 8).round().clamp(-16, 16) / 8 * 2.0**power)
            optimizer.update([0], scalars(step, 3.0 * 2.0**power))
    assert all(torch.equal(arenas[0].bits()[name], bits) for name, bits in arenas[1].bits().items())


@pytest.mark.parametrize("divisor", [2.0**140, 2.0**200, 2.0**-140, 1e300, 5e-324, float("inf"), float("nan"), 0.0])
def test_what_fp32_cannot_hold_is_split(divisor: float) -> None:
    split = scalars(1, divisor)
    if 2.0**-213 < divisor < 2.0**226:
        assert split.tensors[2].double().item() / split.grad_factor.double().item() == divisor
        assert 2.0**-101 < split.tensors[2].item() < 2.0**101
    assert 0 < split.grad_factor.item() < torch.inf
    skipped = scalars(1, divisor, found_inf=2.0)
    assert (skipped.tensors[2].item(), skipped.grad_factor.item(), skipped.tensors[3].item()) == (1.0, 1.0, 1.0)
    gradient = torch.tensor([1.0, torch.inf])
    skipped.rescale([gradient])
    assert gradient.tolist() == [1.0, torch.inf]
