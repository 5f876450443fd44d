"""Modules of other kinds than a plain layer: masks and buffers made from weights in a forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F

import dtrain
from dtrain.checkpoint.names import plain_name
from dtrain.engine.parts.checkpoint import checkpointer
from tests.engines import helpers
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


class Wrapped(nn.Module):
    """Has a buffer, a frozen and a tied weight inside of what may be wrapped."""

    def __init__(self, wrap: str) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 6))
        self.inner[2].requires_grad_(False)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.inner[3].weight
        if wrap == "child":
            self.inner[0] = torch.compile(self.inner[0], backend="eager")
        elif wrap == "checkpoint":
            self.inner = checkpoint_wrapper(self.inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.inner(x))


def wrapped(wrap: str, seed: int) -> Any:
    torch.manual_seed(seed)
    model = Wrapped(wrap)
    return torch.compile(model, backend="eager") if wrap == "all" else model


def plain_digests(engine: Any) -> dict[str, str]:
    return {plain_name(key.replace(":", ":.")): value for key, value in helpers.state_digests(engine).items()}


@check(
    ranks=(2, 1),
    variants={wrap: {} for wrap in ("child", "all", "checkpoint")},
    unless=lambda case: (case.engine, case.stage) == ("deepspeed", 3),  # refuses a compiled module
)
def a_checkpoint_knows_no_wrapper(trial: Trial) -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(trial.rank))
    wrap, names = trial.case.variant, {}
    for number, (first, second) in enumerate(((wrap, ""), ("", wrap), (wrap, wrap))):
        saving, loading = start(trial, wrapped(first, 1)), start(trial, wrapped(second, 2))
        saving.backward(saving(x).square().mean())
        assert saving.step().applied
        saving.copy_buffers()
        folder = trial.folder / str(number)
        if number == 2:  # as older versions have saved it
            with mock.patch.object(checkpointer, "plain_names", lambda names: {name: name for name in names}):
                saving.save(folder)
        else:
            saving.save(folder)
        loading.load(folder)
        assert plain_digests(loading) == plain_digests(saving)
        names[number] = {label.partition(":")[2] for label in helpers.fingerprints(folder)}
    assert names[0] == names[1] == {plain_name(name) for name in names[2]}
    assert any(plain_name(name) != name for name in names[2]), "a control"
