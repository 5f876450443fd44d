"""Models of a user's own, whose memory no formula of dtrain knows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Recomputed(nn.Module):
    """A language model whose blocks are recomputed in backward."""

    def __init__(self, config: Any, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, config.hidden_dim)
        sizes = (config.hidden_dim, config.num_heads, 4 * config.hidden_dim)
        layers = (nn.TransformerEncoderLayer(*sizes, dropout=0.0, batch_first=True) for _ in range(config.num_layers))
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(config.hidden_dim, vocab_size)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return F.cross_entropy(self.head(hidden).float().flatten(0, 1), targets.flatten(), ignore_index=-100)


class Convolutions(nn.Module):
    """One-dimensional convolutions over embedded tokens, with a parameter that nothing uses."""

    def __init__(self, config: Any, vocab_size: int) -> None:
        super().__init__()
        width = config.hidden_dim
        self.embedding = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 5, padding=4) for _ in range(config.num_layers))
        self.unused = nn.Parameter(torch.zeros(width))
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(tokens).transpose(1, 2)
        for layer in self.layers:
            hidden = hidden + F.gelu(layer(hidden)[..., : tokens.shape[1]])
        logits = self.head(hidden.transpose(1, 2)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


class Adapted(nn.Module):
    """Frozen Linears, each with an adapter of rank 4 that is trained."""

    def __init__(self, config: Any, vocab_size: int) -> None:
        super().__init__()
        width = config.hidden_dim
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(
            nn.ModuleList([nn.Linear(width, width), nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)])
            for _ in range(config.num_layers)
        )
        self.head = nn.Linear(width, vocab_size)
        for frozen in (self.embedding, self.head, *(block[0] for block in self.blocks)):
            frozen.requires_grad_(False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for linear, down, up in self.blocks:
            hidden = hidden + F.gelu(linear(hidden) + up(down(hidden)))
        return F.cross_entropy(self.head(hidden).float().flatten(0, 1), targets.flatten(), ignore_index=-100)


class Experts(nn.Module):
    """Four experts, of which one sees a token, in one grouped product; a mask selects what has a loss."""

    def __init__(self, config: Any, vocab_size: int) -> None:
        super().__init__()
        width = config.hidden_dim
        self.embedding = nn.Embedding(vocab_size, width)
        self.gate = nn.Linear(width, 4)
        self.experts = nn.Parameter(torch.randn(4, width, 2 * width) / 16)
        self.head = nn.Linear(2 * width, vocab_size)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(tokens).flatten(0, 1)
        share, expert = self.gate(hidden).float().softmax(-1).max(-1)
        order = expert.argsort()
        ends = (expert[:, None] == torch.arange(4, device=expert.device)).sum(0).cumsum(0).int()
        mixed = torch._grouped_mm(hidden[order], self.experts.to(hidden.dtype), offs=ends)
        mixed = mixed * share[order, None].to(mixed.dtype)
        kept = targets.flatten()[order] != -100
        return F.cross_entropy(self.head(mixed)[kept].float(), targets.flatten()[order][kept])
