"""A small model whose inner Linears are FP8 under ``precision="fp8"``, under any engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dtrain
from dtrain.engine.step import StepEngine
from tests.helpers.net import Net

VOCAB, DIM, INNER, LENGTH = 24, 32, 92, 8
FLOAT8 = [f"blocks.{number}.{name}" for number in range(2) for name in ("up", "down")]


def block(dim: int, inner: int) -> nn.Module:
    """92 inner features, which 16 does not divide."""
    parts = {"norm": nn.LayerNorm(dim), "up": nn.Linear(dim, inner), "down": nn.Linear(inner, dim, bias=False)}
    parts["dropout"] = nn.Dropout(0.1)
    return Net(lambda net, x: x + net.dropout(net.down(torch.tanh(net.up(net.norm(x))))), **parts)


class Float8Model(nn.Module):
    """``factor`` times as wide."""

    def __init__(self, factor: int = 1) -> None:
        super().__init__()
        dim = factor * DIM
        self.embedding = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(block(dim, factor * INNER) for _ in range(2))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float()[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def batch(index: int) -> Tensor:
    """Tokens [4, LENGTH] of the micro-batch with that global index."""
    start = torch.randint(VOCAB, (4, 1), generator=torch.Generator().manual_seed(index))
    return (start + torch.arange(LENGTH) * (1 + index % 3)) % VOCAB


def start(engine: str, zero_stage: int, precision: Any = "fp8", *, wide: bool | None = None, **options: Any) -> Any:
    """The model under an engine, before its first step; wide by default if 128 elements share a scale."""
    if wide is None:
        wide = isinstance(precision, dtrain.PrecisionPolicy) and precision.float8.recipe == "blockwise"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = Float8Model(4 if wide else 1)
    settings = {"optimizer": dtrain.AdamW(lr=3e-3), "max_grad_norm": 0.5, "seed": 5, "precision": precision}
    return dtrain.initialize(model, engine=engine, zero_stage=zero_stage, **settings | options)


def train_step(engine: StepEngine, micro_batches: int = 4) -> dtrain.StepOutcome:
    """One step on ``micro_batches`` over all ranks."""
    first = engine.attempted_steps * micro_batches
    for index in engine.accumulate(range(engine.rank, micro_batches, engine.world_size)):
        engine.backward(engine(tokens=batch(first + index)))
    return engine.step()
