"""A small model in which a chosen place goes wrong on a sample with a trigger, and its training under any engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import dtrain
from dtrain.engine.outcome import Culprit

DIM = 16
TRIGGER = 100.0
STEPS = 4
BAD = (1, 1, 1)  # step, rank (of two) and micro-batch of the trigger


class Square(nn.Module):
    """Overflows FP32 for an input of 1e30."""

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        return x + 1e-3 * (x * factor) ** 2


class Root(nn.Module):
    """A root at 0: its forward is finite, its gradient is not."""

    def forward(self, x: Tensor, is_bad: Tensor) -> Tensor:
        return x + torch.where(is_bad, x - x.detach(), 1 + x * x).sqrt()


class Planted(nn.Module):
    """``fault``: ``module``, ``between`` modules, ``linear`` (in FP16), ``float8`` (in BF16), ``root`` or none."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.first = nn.Linear(DIM, DIM)
        self.norm = nn.BatchNorm1d(DIM)
        self.middle = nn.Linear(DIM, DIM)
        if fault == "float8":
            self.middle.weight.data.mul_(100)
        self.dropout = nn.Dropout(0.1)
        self.square = Square()
        self.root = Root()
        self.head = nn.Linear(DIM, 1)
        self.num_forwards = 0

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.num_forwards += 1
        is_bad = (x == TRIGGER).any()
        large = torch.where(is_bad, 1e30, 1.0)
        h = self.norm(self.first(torch.where(x == TRIGGER, 1.0, x)))
        if self.fault in ("linear", "float8"):
            h = h.float() * torch.where(is_bad, 6e4 if self.fault == "linear" else 1e38, 1.0)
        if self.fault == "between":
            h = (h * large) * large
        h = self.dropout(self.middle(h))
        h = self.square(h, large if self.fault == "module" else torch.ones(()))
        h = self.root(h.float(), is_bad if self.fault == "root" else torch.zeros((), dtype=torch.bool))
        return {"loss": (self.head(h).float().squeeze(-1) - y).square().mean()}


def start(fault: str, model: nn.Module | None = None, **options: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model or Planted(fault)
    return dtrain.initialize(model, **{"precision": "fp32", "seed": 1, **options})


def batches(world: int = 1, rank: int = 0, bad: tuple[int, int, int] = BAD) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """This rank's two micro-batches of each step; a single rank takes the trigger of rank 1."""
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        samples = torch.randn(2, world, 4, DIM + 1, generator=generator)
        if step == bad[0]:
            samples[bad[2], bad[1] % world, 2, 0] = TRIGGER
        yield [(micro[rank, :, :DIM], micro[rank, :, DIM]) for micro in samples]


def train(engine: Any) -> list[dtrain.StepOutcome]:
    outcomes = []
    for batch in batches(engine.world_size, engine.rank):
        for x, y in engine.accumulate(batch):
            engine.backward(engine(x, y=y))
        outcomes.append(engine.step())
    return outcomes


def bits(engine: Any, outcomes: list[dtrain.StepOutcome]) -> dict[str, bytes]:
    """All that an explanation must leave alone, as bytes: weights, buffers, losses, random numbers."""
    tensors = {**engine.master_state(), **dict(engine.module.named_buffers())}
    tensors["losses"] = torch.tensor([(o.loss, o.grad_norm, o.loss_scale) for o in outcomes], dtype=torch.float64)
    tensors["rng"] = torch.get_rng_state()
    return {name: tensor.detach().cpu().contiguous().numpy().tobytes() for name, tensor in tensors.items()}


def culprit_of(outcomes: list[dtrain.StepOutcome]) -> Culprit:
    """The culprit of the planted step, the only one that was skipped."""
    assert [outcome.applied for outcome in outcomes] == [step != BAD[0] for step in range(STEPS)]
    culprit = outcomes[BAD[0]].culprit
    assert culprit is not None
    return culprit
