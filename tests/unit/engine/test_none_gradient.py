from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain


class WithoutWeight(torch.autograd.Function):
    """Uses a weight and gives None as its gradient, as functions do that freeze an input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x + weight.sum() * 0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = WithoutWeight.apply(self.used(x), self.unused)
        return y.square().mean()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_none_as_a_gradient_is_zero(micro_batches: int) -> None:
    engine = dtrain.initialize(Model(), optimizer=dtrain.AdamW(lr=0.1, weight_decay=0.0), precision="fp32")
    for _ in range(2):
        for x in engine.accumulate([torch.ones(2, 4)] * micro_batches):
            engine.backward(engine(x))
        assert engine.step().applied
    state = engine.master_state()
    assert torch.equal(state["unused"], torch.ones(8))
    assert not torch.equal(state["used.weight"], torch.zeros(4, 4))
