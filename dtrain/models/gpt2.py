"""GPT-2 (Radford et al., 2019), as ``model.factory=dtrain.models.gpt2:build``.

LayerNorm before each sub-layer, learned positions, tanh GELU, biases in every layer except the head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.config.model import ModelConfig
from dtrain.errors import ConfigError
from dtrain.models.attention import causal_attention, document_borders
from dtrain.models.causal_lm import (
    ModelOutput,
    SkipDraws,
    draw_init_seed,
    init_weights,
    padded_vocab_size,
)
from dtrain.models.loss_head import LossHead


class GPT2Attention(nn.Module):
    """Causal self-attention, [B, T, hidden] to the same shape; queries, keys and values in one matmul."""

    def __init__(self, hidden_dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(hidden_dim, 3 * hidden_dim)
        self.out = nn.Linear(hidden_dim, hidden_dim)
        self.muon_splits = {"qkv.weight": (hidden_dim,) * 3}

    def forward(self, x: Tensor, borders: Tensor | None = None) -> Tensor:
        queries, keys, values = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(-3)
        dropout = self.dropout if self.training else 0.0
        out: Tensor = self.out(causal_attention(queries, keys, values, dropout, borders))
        return out


class GPT2FeedForward(nn.Module):
    """Computes ``down(gelu(up(x)))``."""

    def __init__(self, hidden_dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_dim, ffn_dim)
        self.down = nn.Linear(ffn_dim, hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return out


class GPT2Block(nn.Module):
    """One pre-norm layer: attention, then the feed-forward network, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(config.hidden_dim, eps=config.norm_eps)
        self.attn = GPT2Attention(config.hidden_dim, config.num_heads, config.dropout)
        self.ffn_norm = nn.LayerNorm(config.hidden_dim, eps=config.norm_eps)
        self.ffn = GPT2FeedForward(config.hidden_dim, ffn_dim(config))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, borders: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attn(self.attn_norm(x), borders))
        out: Tensor = x + self.dropout(self.ffn(self.ffn_norm(x)))
        return out


class GPT2(nn.Module):
    """A causal language model over ``vocab_size`` tokens and at most ``config.max_seq_len`` positions.

    Raises:
        ConfigError: ``hidden_dim`` is not a multiple of ``num_heads``.
    """

    uses_loss_keys = True

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        if config.hidden_dim % config.num_heads:
            raise ConfigError(
                f"model.hidden_dim={config.hidden_dim} is not a multiple of model.num_heads={config.num_heads}"
            )
        init_seed = draw_init_seed()
        self.vocab_size = vocab_size
        self.loss_head = LossHead.of(config, vocab_size)
        with SkipDraws():
            self.embed = nn.Embedding(padded_vocab_size(vocab_size), config.hidden_dim)
            self.positions = nn.Embedding(config.max_seq_len, config.hidden_dim)
            self.dropout = nn.Dropout(config.dropout)
            self.blocks = nn.ModuleList(GPT2Block(config) for _ in range(config.num_layers))
            self.norm = nn.LayerNorm(config.hidden_dim, eps=config.norm_eps)
            self.head = nn.Linear(config.hidden_dim, padded_vocab_size(vocab_size), bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        init_weights(self, init_seed, config.num_layers, residual=("attn.out.weight", "ffn.down.weight"))

    def forward(self, tokens: Tensor, targets: Tensor | None = None, positions: Tensor | None = None) -> ModelOutput:
        """Predicts the next token at each position.

        Args:
            tokens: int64 [B, T], T at most ``max_seq_len``.
            targets: int64 [B, T], the tokens one position ahead; ``IGNORE_INDEX`` (-100) is left out of the loss.
            positions: int64 [B, T], 0 at the first token of each document: tokens see their own document only. None:
                each row is one document.
        """
        borders = None if positions is None else document_borders(positions)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embed(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x, borders)
        return self.loss_head(self.head, self.norm(x), targets, training=self.training)


def ffn_dim(config: ModelConfig) -> int:
    return 4 * config.hidden_dim if config.ffn_dim is None else config.ffn_dim


def build(config: ModelConfig, vocab_size: int) -> nn.Module:
    """Builds GPT-2; raises ``ConfigError`` if the sizes are inconsistent or ``model.args`` has keys."""
    return GPT2(config, vocab_size)
