"""Models of a user for the probe: ``model.factory=tests.helpers.probed_models:build model.args.kind=...``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dtrain.config.model import ModelConfig
from dtrain.models.causal_lm import ModelOutput, causal_lm_output

FACTORY = "model.factory=tests.helpers.probed_models:build"
TINY = [
    *("steps=8", "seeds=2", "model.num_layers=1", "model.hidden_dim=32", "model.num_heads=2", "model.max_seq_len=16"),
    *("train.micro_batch_size=2", "train.global_batch_size=4", "schedule.warmup_steps=2", "launch.device=cpu"),
    "launch.threads_per_rank=1",
]
ODD_NAME = "<b>mix&"
"""Name of a module that HTML must escape."""


class ProbedModel(nn.Module):
    """Embedding, a layer and a head; ``kind`` plants a failure.

    ``overflow``: the activations between layer and head exceed FP16's range. ``raises``: FP16 inputs of the layer raise
    an error.
    """

    def __init__(self, vocab_size: int, width: int, kind: str, dropout: float) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleDict({ODD_NAME: nn.Linear(width, width)})
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocab_size)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> ModelOutput:
        self.calls += 1
        x = self.layers[ODD_NAME](self.dropout(self.embedding(tokens)))
        if self.kind == "raises" and x.dtype == torch.float16:
            raise RuntimeError("this layer has no FP16")
        if self.kind == "overflow":
            x = x * 2.0**20 * 2.0**-20
        return causal_lm_output(self.head(x), targets)


def build(config: ModelConfig, vocab_size: int) -> nn.Module:
    args: dict[str, Any] = config.args
    return ProbedModel(vocab_size, args.get("width", 16), args.get("kind", ""), config.dropout)
