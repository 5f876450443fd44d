"""Modules of other kinds than a plain layer: masks and buffers made from weights in a forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dtrain
from tests.engines.matrix import Trial, check

MASK, ORDER = torch.eye(4, dtype=torch.bool), torch.tensor([2, 0, 3, 1])


def masked(scores: Tensor, hidden: Tensor) -> Tensor:
    """As models do that take the minimum of a mask from the dtype of their hidden states."""
    return scores.masked_fill(MASK, torch.finfo(hidden.dtype).min)


def clamped(scores: Tensor, hidden: Tensor) -> Tensor:
    bounds = torch.finfo(hidden.dtype)
    return torch.where(MASK, bounds.min, scores).clamp(bounds.min, bounds.max)


def filled(scores: Tensor, hidden: Tensor) -> Tensor:
    mask = torch.full_like(scores, torch.finfo(hidden.dtype).min).triu(1)
    return torch.maximum(scores + mask, torch.full((4, 4), torch.finfo(hidden.dtype).min, dtype=scores.dtype))


def scattered(scores: Tensor, hidden: Tensor) -> Tensor:
    return scores.new_zeros(4, 4).index_add_(0, ORDER, hidden) + scores


def assigned(scores: Tensor, hidden: Tensor) -> Tensor:
    out = torch.zeros_like(scores)
    out[ORDER] = hidden
    return torch.lerp(out, scores, 0.5)


class Attend(nn.Module):
    """Its norm returns FP32, and the product with its parameter has the dtype of that: FP32 under plain autocast."""

    def __init__(self, combine: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.inner, self.scale = nn.LayerNorm(4), nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.combine = combine

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        scores = self.scale * F.softplus(self.inner(hidden))
        return self.combine(scores, hidden).softmax(-1)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(map(Attend, (masked, clamped, filled, scattered, assigned)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([unit(x) for unit in self.units])


def start(trial: Trial, model: nn.Module, **options: Any) -> Any:
    torch.set_num_threads(1)
    case = trial.case
    settings = {"engine": case.engine, "zero_stage": case.stage, "precision": case.precision, "seed": 0, **options}
    return dtrain.initialize(model, **settings)


@check(precisions=("bf16", "fp16"), ranks=(1, 2))
def fp32_of_norms_meets_what_weights_have_made(trial: Trial) -> None:
    torch.manual_seed(0)
    model, x = Attends(), torch.randn(4, 4)
    expected = model(x).square().mean()
    engine = start(trial, model, loss_scale=1.0)
    engine.backward(engine(x).square().mean())
    outcome = engine.step()
    assert outcome.applied
    assert outcome.loss == pytest.approx(expected.item(), rel=1e-2)
