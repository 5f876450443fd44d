"""The models of the zoo: small modules that each break some assumption about models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.net import Net

VOCAB = 13
LENGTH = 6


def at_least_fp32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross entropy of ``logits`` [batch, length, vocabulary] for the next of ``tokens`` [batch, length]."""
    return F.cross_entropy(at_least_fp32(logits[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Block(nn.Module):
    """Pre-norm causal attention and feed-forward."""

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.ffn_norm = nn.LayerNorm(dim)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.ffn(self.ffn_norm(x)))


class Transformer(nn.Module):
    """Blocks in a ModuleList between an embedding and a head, which may be tied; one block may run several times."""

    def __init__(self, dropout: float = 0.0, tied: bool = False, num_blocks: int = 2, passes: int = 1) -> None:
        super().__init__()
        self.passes = passes
        self.embedding = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList(Block(8, 2, dropout) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            for _ in range(self.passes):
                x = block(x)
        return _token_loss(self.head(self.norm(x)), tokens)


class PartlyFrozen(Transformer):
    """Frozen: a whole module, a whole block, and one of the two parameters of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
        self.norm.bias.requires_grad_(False)


def unused() -> nn.Module:
    """A layer and a bare parameter that no forward reads."""
    parts = {"used": nn.Linear(8, 4), "unused_layer": nn.Linear(3, 5), "unused": nn.Parameter(torch.randn(7))}
    return Net(lambda net, x: net.used(x), **parts)


class SometimesUsed(nn.Module):
    """An expert that only every third micro-batch goes through, so ranks differ in which gradients they have."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.expert = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, use_expert: bool) -> Tensor:
        x = torch.tanh(self.trunk(x))
        return self.head(self.expert(x) if use_expert else x)


def recurrent() -> nn.Module:
    """A two-layer GRU, which keeps its parameters in a flat list of its own, then a norm."""
    parts = {"embedding": nn.Embedding(VOCAB, 6), "gru": nn.GRU(6, 5, num_layers=2, batch_first=True)}
    parts |= {"norm": nn.LayerNorm(5), "head": nn.Linear(5, VOCAB)}
    return Net(lambda net, tokens: _token_loss(net.head(net.norm(net.gru(net.embedding(tokens))[0])), tokens), **parts)


class Attention(nn.Module):
    """nn.MultiheadAttention, which reads the weight of its output layer without calling that layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.attention = nn.Embedding(VOCAB, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).triu(1)
        mixed, _ = self.attention(x, x, x, attn_mask=mask, need_weights=False)
        return _token_loss(self.head(self.norm(x + mixed)), tokens)


def conv_net(norm: Callable[[int], nn.Module]) -> nn.Module:
    """Convolutions, with GroupNorm or BatchNorm (float and integer buffers)."""
    first, second = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.Conv2d(4, 8, 3, stride=2)
    features = nn.Sequential(first, norm(4), nn.ReLU(), second, norm(8), nn.ReLU())

    def run(net: Any, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(at_least_fp32(net.head(net.features(images).mean((2, 3)))), labels)

    return Net(run, features=features, head=nn.Linear(8, 2))


class Buffers(nn.Module):
    """Buffers of several types: read, written by the forward, kept out of the state dict."""

    scale: Tensor
    largest: Tensor
    calls: Tensor
    order: Tensor
    keep: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("scale", torch.rand(8) + 0.5)
        self.register_buffer("largest", torch.tensor(0.0))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("order", torch.randperm(8, dtype=torch.int32))
        self.register_buffer("keep", torch.rand(8) > 0.2, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.largest.copy_(torch.maximum(self.largest, x.detach().abs().max()))
        return self.layer((x * self.scale * self.keep)[:, self.order])


def mixed_arguments() -> nn.Module:
    """Takes a tensor and a tuple by position, the rest by keyword, one with a default."""

    def run(net: Any, x: Tensor, pair: tuple[Tensor, Tensor], *, target: Tensor, gain: float = 1.0) -> Tensor:
        return F.mse_loss(at_least_fp32(net.left(x) + gain * net.right(pair[0] * pair[1])), target)

    return Net(run, left=nn.Linear(8, 4), right=nn.Linear(3, 4))


@dataclass
class Output:
    """Output of ObjectOutput, an object as model libraries return it."""

    loss: Tensor
    prediction: Tensor


def object_output() -> nn.Module:
    """Returns a record with the loss as an attribute."""

    def run(net: Any, x: Tensor, y: Tensor) -> Output:
        prediction = net.layer(x)
        return Output(F.mse_loss(at_least_fp32(prediction), y), prediction)

    return Net(run, layer=nn.Linear(8, 4))


class OddSizes(nn.Module):
    """Prime dimensions, a parameter without dimensions, one without elements, one with a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 11)
        self.second = nn.Linear(11, 5, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 11))
        self.shift = nn.Parameter(torch.zeros(1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.cat([torch.tanh(self.first(x)), self.empty])
        return self.scale * self.second(hidden) + self.shift.flatten()


class Nested(nn.Module):
    """ModuleList in ModuleList, Sequential in Sequential, ModuleDict, and a parameter beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(self._layer() for _ in range(2)) for _ in range(2))
        self.gate = nn.Parameter(torch.ones(8))
        self.heads = nn.ModuleDict({"main": nn.Linear(8, 4), "skip": nn.Linear(8, 4, bias=False)})

    @staticmethod
    def _layer() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 8), nn.SiLU()))

    def forward(self, x: Tensor) -> Tensor:
        start = x
        for stage in self.stages:
            for layer in stage:
                x = x + self.gate * layer(x)
        return self.heads["main"](x) + self.heads["skip"](start)


def weight_norm() -> nn.Module:
    """Weights computed from other parameters whenever they are read."""
    first = nn.utils.parametrizations.weight_norm(nn.Linear(8, 12))
    second = nn.utils.parametrizations.weight_norm(nn.Linear(12, 4), dim=1)
    return Net(lambda net, x: net.second(torch.relu(net.first(x))), first=first, second=second)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
