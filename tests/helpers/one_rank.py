"""One small model under an engine of one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import dtrain

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def build() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))


def start(model: nn.Module | None = None, **options: Any) -> Any:
    return dtrain.initialize(model or build(), **{"precision": "fp32", "seed": 0, **options})


def loss_of(engine: Any, x: Tensor = X) -> Tensor:
    return engine(x).square().mean()


def train_step(engine: Any, x: Tensor = X, **options: Any) -> dtrain.StepOutcome:
    engine.backward(loss_of(engine, x), **options)
    return engine.step()


def masters(engine: Any) -> dict[str, Tensor]:
    return engine.master_state()


def unchanged(engine: Any, before: dict[str, Tensor]) -> bool:
    after = masters(engine)
    return all(torch.equal(after[name], before[name]) for name in before)
