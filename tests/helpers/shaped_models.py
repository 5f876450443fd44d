"""Models whose sizes break rules of Tensor Cores, or none: ``model.factory=tests.helpers.shaped_models:build_bad``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.config.model import ModelConfig
from dtrain.models.causal_lm import ModelOutput, causal_lm_output


class Block(nn.Module):
    """Attention and feed-forward; queries, keys and values are as wide as ``heads`` heads."""

    def __init__(self, hidden: int, heads: int, head_dim: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(hidden, heads * head_dim) for _ in range(3))
        self.out = nn.Linear(heads * head_dim, hidden)
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(x)))


class Shaped(nn.Module):
    """A language model of ``Block``."""

    def __init__(self, hidden: int, heads: int, head_dim: int, ffn: int, vocab_rows: int, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.embed = nn.Embedding(vocab_rows, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, head_dim, ffn) for _ in range(2))
        self.head = nn.Linear(hidden, vocab_rows, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, positions: Tensor | None = None) -> ModelOutput:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return causal_lm_output(self.head(x)[..., : self.vocab_size], targets)


def build_bad(config: ModelConfig, vocab_size: int) -> nn.Module:
    """Vocabulary 257, hidden dim 60, feed-forward 101, heads of dim 12: four sizes that are no multiples of 8."""
    return Shaped(60, 6, 12, 101, vocab_size, vocab_size)


def build_good(config: ModelConfig, vocab_size: int) -> nn.Module:
    return Shaped(64, 4, 16, 104, 264, vocab_size)


class Images(nn.Module):
    """Two convolutions and a classifier, on the tokens as pixels."""

    def __init__(self, channels: int, inner: int, classes: int) -> None:
        super().__init__()
        self.channels = channels
        self.first = nn.Conv2d(channels, 16, 3, padding=1)
        self.second = nn.Conv2d(16, inner, 3, padding=1, stride=2)
        self.head = nn.Linear(inner, classes)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, positions: Tensor | None = None) -> Any:
        batch = tokens.shape[0]
        pixels = tokens.view(batch, 1, 16, -1).expand(-1, self.channels, -1, -1).to(self.first.weight.dtype)
        pooled = F.relu(self.second(F.relu(self.first(pixels / 256)))).mean((2, 3))
        loss = F.cross_entropy(self.head(pooled).float(), torch.zeros(batch, dtype=torch.int64, device=tokens.device))
        return ModelOutput(loss, loss)


def build_images(config: ModelConfig, vocab_size: int) -> nn.Module:
    """Channels 3 and 20 are no multiples of 8; ``model.args`` may replace them."""
    return Images(config.args.get("channels", 3), config.args.get("inner", 20), 16)
