"""Models that use their parameters in ways that unsharding must survive; blocks are the units."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.net import Net

DIM = 8


class Stack(nn.Module):
    """Blocks between a first and a last layer, which are the root's; the loss is a mean square.

    ``order(blocks, x)`` runs the blocks; by default one after the other.
    """

    def __init__(self, *blocks: nn.Module, order: Callable[[Any, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.order = order
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.tanh(self.first(x)))).float().square().mean()

    def middle(self, x: Tensor) -> Tensor:
        if self.order is not None:
            return self.order(self.blocks, x)
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    """Two layers; ``inside``: the second runs under activation checkpointing, so without its unit in backward."""

    def __init__(self, inside: bool = False) -> None:
        super().__init__()
        self.inside = inside
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        return x + (checkpoint(self.down, hidden, use_reentrant=False) if self.inside else self.down(hidden))


def recomputed(blocks: Any, x: Tensor) -> Tensor:
    """Recomputes whole blocks in backward, the last two as one."""
    x = checkpoint(blocks[0], x, use_reentrant=False)
    return checkpoint(lambda y: blocks[2](blocks[1](y)), x, use_reentrant=False)


def reused(blocks: Any, x: Tensor) -> Tensor:
    """Not in one direction."""
    a, b = blocks
    return a(a(b(a(x))))


def interleaved(blocks: Any, x: Tensor) -> Tensor:
    """Branches that run side by side in backward."""
    a, b, c = blocks
    return c(a(x) * b(x) + a(x))


def branching(blocks: Any, x: Tensor) -> Tensor:
    """A block that depends on the data, which is the same on all ranks, and one that no forward uses."""
    a, b, c, _ = blocks
    return c(b(a(x))) if x.shape[0] % 2 else c(a(x))


class DictBlock(Block):
    """Takes and returns a dict."""

    def forward(self, x: Any) -> Any:
        return {"x": super().forward(x["x"]), "seen": [x["x"].detach()]}


def in_dicts(blocks: Any, x: Tensor) -> Tensor:
    return functools.reduce(lambda state, block: block(state), blocks, {"x": x})["x"]


class GruBlock(nn.Module):
    """A GRU, which keeps its parameters in a list of its own; ``inside``: under activation checkpointing."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside = inside
        self.gru = nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return (checkpoint(self.gru, x, use_reentrant=False) if self.inside else self.gru(x))[0]


def attention_block() -> nn.Module:
    """nn.MultiheadAttention reads the weight of its output layer without calling it."""
    attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
    return Net(lambda net, x: x + net.attention(x, x, x, need_weights=False)[0], attention=attention)


class DetachedBlock(Block):
    """Computes with a weight as a constant as well, and returns a view of a parameter in its output."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + nn.functional.linear(x, self.up.weight.detach()[:DIM]) + self.down.bias[:1]


class Penalty(Stack):
    """The gradient of the output by the input is part of the loss."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(x)
        x = x.requires_grad_()
        loss = super().forward(x)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Stack(*(Block() for _ in range(5))),
    "checkpointed_blocks": lambda: Stack(*(Block() for _ in range(3)), order=recomputed),
    "checkpointed_inside": lambda: Stack(*(Block(inside=True) for _ in range(3))),
    "reused": lambda: Stack(Block(), Block(), order=reused),
    "interleaved": lambda: Stack(*(Block() for _ in range(3)), order=interleaved),
    "branching": lambda: Stack(*(Block() for _ in range(4)), order=branching),
    "dicts": lambda: Stack(*(DictBlock() for _ in range(3)), order=in_dicts),
    "gru": lambda: Stack(GruBlock(False), GruBlock(True), GruBlock(False)),
    "attention": lambda: Stack(attention_block(), attention_block()),
    "detached": lambda: Stack(DetachedBlock(), DetachedBlock()),
    "penalty": lambda: Penalty(Block(), Block()),
    "weight_norm": lambda: Stack(*(nn.utils.parametrizations.weight_norm(nn.Linear(DIM, DIM)) for _ in range(2))),
    "lists_in_lists": lambda: Stack(*(nn.ModuleList(Block() for _ in range(2)) for _ in range(2)), order=of_lists),
}


def of_lists(lists: Any, x: Tensor) -> Tensor:
    """Units that are lists, which nobody calls."""
    for block in itertools.chain.from_iterable(lists):
        x = block(x)
    return x


def build(name: str) -> nn.Module:
    """The model of that name with the same weights in any process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return MODELS[name]()


def batch(step: int, index: int) -> Tensor:
    """[3 or 4, 5, DIM], the size by the step."""
    return torch.randn(3 + step % 2, 5, DIM, generator=torch.Generator().manual_seed(100 * step + index))
