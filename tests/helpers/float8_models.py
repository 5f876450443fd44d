"""A small model whose blocks compute in FP8, in sizes that neither Tensor Cores nor ranks divide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import dtrain
from dtrain.config.precision import Float8
from dtrain.engine.native import NativeEngine

DIM = 30
RECIPES = ("tensorwise", "rowwise")


class Block(nn.Module):
    """Two FP8 products with biases, after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 3 * DIM)
        self.down = nn.Linear(3 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks between a first and a last product, which stay in BF16."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.last = nn.Linear(DIM, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).float().square().mean()


def build(num_blocks: int = 2) -> Model:
    """Weights of magnitudes so different that many are subnormal in FP8, where a bit of the scale shows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Model(num_blocks)
        with torch.no_grad():
            for block in model.blocks:
                for linear in (block.up, block.down):
                    linear.weight.mul_(10 ** -(0.7 + 5 * torch.rand_like(linear.weight)))
    return model


def start(recipe: str = "tensorwise", model: nn.Module | None = None, **options: Any) -> NativeEngine:
    """The engine of a model; a learning rate at which the largest weights change their binade within a few steps."""
    torch.set_num_threads(1)
    precision = dtrain.PrecisionPolicy.named("fp8", float8=Float8(recipe))
    defaults = {"precision": precision, "seed": 1, "max_grad_norm": 0.1, "optimizer": dtrain.AdamW(lr=0.01)}
    engine = dtrain.initialize(build() if model is None else model, **{**defaults, **options})
    assert isinstance(engine, NativeEngine)
    return engine


def batch(step: int, index: int) -> Tensor:
    return torch.randn(6, DIM, generator=torch.Generator().manual_seed(100 * step + index))


def train(engine: NativeEngine, steps: Sequence[int], num_micro_batches: int = 4) -> list[float]:
    """Returns the losses of ``steps``, each of ``num_micro_batches`` of unequal weight on all ranks together."""
    losses = []
    for step in steps:
        for index in engine.accumulate(range(engine.rank, num_micro_batches, engine.world_size)):
            engine.backward(engine(batch(step, index)), weight=1.0 + 0.1 * index)
        losses.append(engine.step().loss)
    return losses


def copies(engine: NativeEngine) -> dict[str, Tensor]:
    """Bits of this rank's FP8 replicas and of the scales in force."""
    table = engine.sharded.scales._table
    found = {"scales": table.scale.clone()}
    for replica in (buffer.replica for buffer in engine.sharded.buffers):
        if replica.layout.dtype.itemsize == 1:
            for n, local in enumerate(replica.local):
                found[f"{replica.layout.name}/{n}"] = local.view(torch.uint8).clone()
    return found
