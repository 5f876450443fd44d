"""A factory of a small language model that goes wrong on samples with a marker.

A sample with ``#`` overflows in the forward of ``blocks.1.square``. One with ``~`` has a root at 0 in
``blocks.1.root``, whose forward is finite and whose gradient is not.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from dtrain.config.model import ModelConfig
from dtrain.data.sampling import sample_id
from dtrain.models import ModelOutput
from dtrain.models.causal_lm import causal_lm_output

FACTORY = "model.factory=tests.helpers.planted_overflow:build"
FORWARD, BACKWARD = "#", "~"


def write_text(file: Path, seq_len: int, num_samples: int, seed: int, markers: dict[int, str]) -> str:
    """Writes training samples of which the one drawn at each global index of ``markers`` begins with its marker.

    The validation split takes one more window from the end.
    """
    samples = [f"{number:04d} and on " * seq_len for number in range(num_samples + 1)]
    for index, marker in markers.items():
        place = sample_id(seed, index, num_samples)
        samples[place] = marker + samples[place]
    file.write_text("".join(sample[:seq_len] for sample in samples) + "..", encoding="ascii")
    return f"data.files={file}"


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1e-3 * x * x


class Root(nn.Module):
    def forward(self, x: Tensor, is_zero: Tensor) -> Tensor:
        return x + 1e-3 * torch.where(is_zero, x - x.detach(), 1 + x * x).sqrt()


class Block(nn.Module):
    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.linear = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)
        self.square = Square()
        self.root = Root()

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        h = self.dropout(self.linear(self.norm(x)))
        factor = torch.where((tokens == ord(FORWARD)).any(1), 1e30, 1.0)
        h = self.square(h * factor[:, None, None])
        is_zero = (tokens == ord(BACKWARD)).any(1)[:, None, None]
        return x + self.root(h, is_zero)


class Planted(nn.Module):
    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        dim = config.hidden_dim
        self.embed = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(Block(dim, config.dropout) for _ in range(2))
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> ModelOutput:
        x = self.blocks[0](self.embed(tokens), torch.zeros_like(tokens))
        return causal_lm_output(self.head(self.blocks[1](x, tokens)), targets)


def build(config: ModelConfig, vocab_size: int) -> nn.Module:
    return Planted(config, vocab_size)
