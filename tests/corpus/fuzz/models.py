"""Models of the fuzz: parts of many kinds in a row, reused, tied, frozen, and used by some micro-batches only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

LENGTH, VOCAB = 3, 5
SMOOTH = (
    "linear",
    "linear",
    "mlp",
    "layer_norm",
    "rms_norm",
    "conv",
    "attention",
    "gru",
    "scale",
    "buffer",
    "recomputed",
)
"""Kinds whose gradients change little with a rounded input."""
KINDS = (*SMOOTH, "lstm", "experts", "weight_norm", "nested")


@dataclass(frozen=True)
class Part:
    """One part of a model, whose input and output have the same shape.

    Attributes:
        inner: the inner dimension, or the number of experts.
        frozen: "" or ``all``, or ``weight``: parameters with that in their names.
        again: index of an earlier part that is used again instead; of this one then nothing else counts.
        tied: index of an earlier part; if both are Linears, they have one weight.
    """

    kind: str = "linear"
    inner: int = 3
    frozen: str = ""
    again: int | None = None
    tied: int | None = None


@dataclass(frozen=True)
class Model:
    """A whole model: numbers to numbers, or tokens to tokens.

    Attributes:
        tied_head: the head has the weight of the embedding.
        container: ``ModuleList``, ``Sequential``, or ``attributes`` of the model.
        unused: there are parameters that no forward uses, one of them without elements.
        dtype: of the parameters as they are built.
    """

    dim: int = 4
    parts: tuple[Part, ...] = (Part(),)
    tokens: bool = False
    tied_head: bool = False
    container: str = "ModuleList"
    unused: bool = False
    dtype: str = "float32"

    def build(self, seed: int = 0) -> Composed:
        """The model; ``seed`` decides its weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Composed(self).to(getattr(torch, self.dtype))


class _Piped(nn.Module):
    """Calls a module, or one of several, with what a part of that kind adds around it."""

    def __init__(self, kind: str, dim: int, inner: int) -> None:
        super().__init__()
        self.kind = kind
        if kind in ("linear", "recomputed"):
            self.layer: nn.Module = nn.Linear(dim, dim, bias=inner > 1)
        elif kind == "mlp":
            self.layer = nn.Sequential(nn.Linear(dim, inner), nn.GELU(), nn.Linear(inner, dim))
        elif kind == "layer_norm":
            self.layer = nn.LayerNorm(dim)
        elif kind == "rms_norm":
            self.layer = nn.RMSNorm(dim, eps=1e-3)
        elif kind == "conv":
            self.layer = nn.Conv1d(dim, dim, 3, padding=1)
        elif kind == "attention":
            self.layer = nn.MultiheadAttention(dim, 1, batch_first=True)
        elif kind in ("gru", "lstm"):
            self.layer = (nn.GRU if kind == "gru" else nn.LSTM)(dim, dim, batch_first=True)
        elif kind == "experts":
            self.layer = nn.ModuleList(nn.Linear(dim, dim) for _ in range(inner))
        elif kind == "weight_norm":
            self.layer = weight_norm(nn.Linear(dim, dim))
        elif kind == "nested":
            self.layer = nn.Sequential(nn.ModuleDict({"a": nn.Linear(dim, inner), "b": nn.Linear(inner, dim)}))
        elif kind == "scale":
            self.factor = nn.Parameter(torch.rand(() if inner == 1 else dim) + 0.5)
        elif kind == "buffer":
            self.register_buffer("shift", torch.rand(dim, dtype=torch.float64))
            self.register_buffer("sign", torch.tensor([-1 if inner == 1 else 1]), persistent=inner > 1)

    def forward(self, x: Tensor, use: int) -> Tensor:
        kind = self.kind
        if kind == "scale":
            return x * self.factor
        if kind == "buffer":
            return x + self.shift.to(x.dtype) * self.sign
        if kind == "recomputed":
            return x + torch.tanh(checkpoint(self.layer, x, use_reentrant=False))
        if kind == "conv":
            return x + torch.tanh(self.layer(x.transpose(1, 2))).transpose(1, 2)
        if kind == "attention":
            return x + self.layer(x, x, x, need_weights=False)[0]
        if kind in ("gru", "lstm"):
            return x + self.layer(x)[0]
        if kind == "experts":
            return x + torch.tanh(self.layer[use % len(self.layer)](x))
        if kind == "nested":
            inside = self.layer[0]
            return x + inside["b"](torch.tanh(inside["a"](x)))
        return x + torch.tanh(self.layer(x))


class Composed(nn.Module):
    """The model of a ``Model``; its forward takes a micro-batch and returns the loss."""

    def __init__(self, spec: Model) -> None:
        super().__init__()
        self.spec = spec
        dim, out = spec.dim, VOCAB if spec.tokens else 2
        self.first = nn.Embedding(VOCAB, dim) if spec.tokens else nn.Linear(3, dim)
        own, self.order = [], []
        for part in spec.parts:
            if part.again is not None and own:
                self.order.append(part.again % len(own))
                continue
            module = _Piped(part.kind, dim, part.inner)
            if part.tied is not None and own:
                _tie(module, own[part.tied % len(own)])
            for name, parameter in module.named_parameters():
                if part.frozen == "all" or (part.frozen and part.frozen in name):
                    parameter.requires_grad_(False)
            self.order.append(len(own))
            own.append(module)
        if spec.container == "attributes":
            for index, module in enumerate(own):
                setattr(self, f"part{index}", module)
        else:
            self.parts = getattr(nn, spec.container)(*([own] if spec.container == "ModuleList" else own))
        self.head = nn.Linear(dim, out)
        if spec.tokens and spec.tied_head:
            self.head.weight = self.first.weight
        if spec.unused:
            self.unused, self.nothing = nn.Linear(2, 3), nn.Parameter(torch.empty(0, 2))

    def _own(self, index: int) -> nn.Module:
        return getattr(self, f"part{index}") if self.spec.container == "attributes" else self.parts[index]

    def forward(self, inputs: Tensor, targets: Tensor, use: int, bad: str) -> Tensor:
        x = self.first(inputs)
        for index in self.order:
            x = self._own(index)(x, use)
        out = self.head(x).float()
        loss = F.cross_entropy(out.flatten(0, 1), targets.flatten()) if self.spec.tokens else F.mse_loss(out, targets)
        if bad == "loss":
            return loss * torch.inf
        return loss + (out - out.detach()).sum().abs().sqrt() if bad == "gradient" else loss  # its gradient is NaN


def _tie(module: nn.Module, other: nn.Module) -> None:
    mine, theirs = (getattr(own, "layer", None) for own in (module, other))
    if isinstance(mine, nn.Linear) and isinstance(theirs, nn.Linear) and type(mine) is type(theirs) is nn.Linear:
        mine.weight = theirs.weight


def micro_batch(spec: Model, seed: int, use: int, bad: str) -> Mapping[str, Any]:
    """Two samples for the model; ``seed`` decides them."""
    draw = torch.Generator().manual_seed(seed)
    if spec.tokens:
        inputs, targets = torch.randint(VOCAB, (2, 2, LENGTH), generator=draw)
    else:
        inputs, targets = (torch.randn(2, LENGTH, size, generator=draw) for size in (3, 2))
    return {"inputs": inputs, "targets": targets, "use": use, "bad": bad}


def trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The trained parameters by name, tied ones once."""
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)
