"""Models of frozen weights with trained adapters; blocks are the units."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

RANK, VOCAB = 4, 50


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
    """A frozen embedding, blocks of all kinds, a frozen norm and a trained head; the loss is a mean square.

    Args:
        dim: of the model.
        seed: of the weights.
        recomputes: whether the blocks run under activation checkpointing.
    """

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
