from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dtrain.measure.noise import Noise, perturb_by_an_ulp


def test_noise_is_the_standard_deviation_with_the_reference() -> None:
    found = Noise.of(2.0, [2.0 + 2.0**-9], [1.0, 3.0])
    assert found.rounding == pytest.approx(2.0**-9 / math.sqrt(2))
    assert found.seed == pytest.approx(1.0)
    assert found.unit == pytest.approx(math.hypot(1.0, 2.0**-9 / math.sqrt(2)))


def test_weights_move_by_an_ulp() -> None:
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 2))
    model[1].requires_grad_(False)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    perturb_by_an_ulp(model, seed=3)
    after = [parameter.detach() for parameter in model.parameters()]
    for old, new in zip(before[:2], after[:2], strict=True):
        up, down = (torch.nextafter(old, torch.full_like(old, limit)) for limit in (math.inf, -math.inf))
        assert bool(((new == up) | (new == down)).all())
        assert bool((new == up).any())
        assert bool((new == down).any())
    assert all(map(torch.equal, before[2:], after[2:]))
