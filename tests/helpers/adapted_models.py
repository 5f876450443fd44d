"""Models of frozen weights with trained adapters, whose blocks are the units, and their engines."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import dtrain
from dtrain.config.engines import Native
from dtrain.config.precision import Float8
from dtrain.engine.adapters.native import NativeEngine

DIM, RANK, VOCAB = 32, 4, 50
LINEARS = [f"blocks.{number}.{name}" for number in range(5) for name in ("up", "down")]
"""The layers whose frozen weights are in FP8, if the precision is."""


class FrozenBlock(nn.Module):
    """A norm and two layers, all frozen."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.hidden(self.norm(x)))

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x))


class AdaptedBlock(FrozenBlock):
    """Adds a trained product of low rank to the first layer."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.narrow = nn.Linear(dim, RANK, bias=False)
        self.widen = nn.Linear(RANK, 2 * dim, bias=False)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x) + self.widen(self.narrow(x)))


class QuantizedBlock(AdaptedBlock):
    """Its second layer has a weight of int8, which is no floating-point parameter and cannot be sharded."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.codes = nn.Parameter(torch.randint(-128, 128, (dim, 2 * dim), dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(self.norm(x))
        return x + functional.linear(hidden, self.codes.to(hidden.dtype) / 1024) + self.down(hidden)


class Adapted(nn.Module):
    """A frozen embedding, blocks of all kinds, a frozen norm and a trained head; the loss is a mean square."""

    def __init__(self, dim: int, seed: int = 0, *, recomputes: bool = False) -> None:
        super().__init__()
        self.recomputes = recomputes
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(VOCAB, dim).requires_grad_(False)
            kinds = (AdaptedBlock, AdaptedBlock, FrozenBlock, QuantizedBlock, AdaptedBlock)
            self.blocks = nn.ModuleList(kind(dim) for kind in kinds)
            self.norm = nn.LayerNorm(dim).requires_grad_(False)
            self.head = nn.Linear(dim, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(self.norm(x)).float().square().mean()


def batch(step: int, index: int) -> Tensor:
    """Token indices [4, 6]."""
    return torch.randint(VOCAB, (4, 6), generator=torch.Generator().manual_seed(100 * step + index))


def start(
    stage: int = 3,
    precision: str = "fp8",
    *,
    model: Adapted | None = None,
    dim: int = DIM,
    seed: int = 0,
    recomputes: bool = False,
    frozen_source: Any = None,
    **options: Any,
) -> NativeEngine:
    """Returns the native engine of a model; ``precision`` may be ``fp8-rowwise``."""
    name, _, recipe = precision.partition("-")
    engine = dtrain.initialize(
        model or Adapted(dim, seed, recomputes=recomputes),
        engine=Native(zero_stage=stage, **options),
        precision=dtrain.PrecisionPolicy.named(name, float8=Float8(recipe or "tensorwise")),
        seed=5,
        max_grad_norm=0.5,
        audit=1,
        optimizer=dtrain.AdamW(lr=0.01),
        frozen_source=frozen_source,
    )
    assert isinstance(engine, NativeEngine)
    return engine


def train(engine: NativeEngine, steps: range = range(3)) -> list[float]:
    """Four micro-batches a step of all ranks together, of unequal weight, and an evaluation; returns all losses."""
    losses = []
    for step in steps:
        for index in engine.accumulate(range(engine.rank, 4, engine.world_size)):
            engine.backward(engine(batch(step, index)), weight=1.0 + index % 3)
        losses.append(engine.step().loss)
        with engine.eval():
            losses.append(float(engine(batch(step, 9))))
    return losses


def float8_weights(engine: NativeEngine) -> dict[str, Tensor]:
    """The frozen weights that FP8 products compute with; all ranks call."""
    return {name: values.clone() for weights in engine.states.frozen_float8 for name, values in weights.full()}


def held(engine: NativeEngine) -> dict[str, list[tuple[int, Tensor]]]:
    """Returns what this rank holds of the frozen parameters, by name: (first element, values)."""
    found = {shard.name: [(shard.start, shard.data.clone())] for shard in engine.states.frozen_shards()}
    whole = {name: [(0, tensor.clone().view(-1))] for name, tensor in engine.states.replicated_frozen().items()}
    float8 = {name: [(0, tensor.view(-1))] for name, tensor in float8_weights(engine).items()}
    assert not found.keys() & whole.keys()
    return found | whole | float8


def joined(ranks: list[dict[str, list[tuple[int, Tensor]]]]) -> dict[str, Tensor]:
    """Returns the frozen parameters in full, 1-D, from what the ranks hold; a rank may hold all of one."""
    found: dict[str, dict[int, Tensor]] = {}
    for name, shards in itertools.chain.from_iterable(rank.items() for rank in ranks):
        found.setdefault(name, {}).update(shards)
    return {name: torch.cat([shards[start] for start in sorted(shards)]) for name, shards in found.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)
