"""The evidence of a calibrated loss scale: shares flushed at scale 1 and at the chosen one, of all measured steps."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain


class Planted(nn.Module):
    """The gradient of its parameter is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(100))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight.float() * gradient).sum()


def test_shares_are_of_all_measured_steps(caplog: pytest.LogCaptureFixture) -> None:
    """The scale changes between the two measured steps: both count without it."""
    scale = dtrain.LossScale("calibrated", init=1024.0, calibration_steps=2, growth_interval=1)
    engine: Any = dtrain.initialize(Planted(), precision="fp16", loss_scale=scale, seed=0)
    with caplog.at_level(logging.INFO):
        for small in (20, 40):
            gradient = torch.full((100,), 0.5)
            gradient[:small] = 2.0**-26  # lost at scale 1
            gradient[0] = 0.0
            engine.backward(engine(gradient))
            engine.step()
    # 2^-26 x 8,192 is 2^-13: kept. Not zero: 99 and 99; lost: 19 and 39
    lines = [line for line in caplog.messages if "FP16 flushes" in line]
    assert [line.split("; ")[1] for line in lines] == [
        f"of the measured gradients FP16 flushes {58 / 198:.2%} to zero at scale 1, 0.00% at 8192"
    ]
