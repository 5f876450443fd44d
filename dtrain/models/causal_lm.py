"""What the built-in language models share: their output, the loss, the padding of the vocabulary, their first weights.

The vocabulary is padded to a multiple of 64 for the Tensor Cores; padded entries are cut off before anything can see
their logits.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.config.schema import VOCAB_MULTIPLE, ModelConfig
from dtrain.errors import ConfigError
from dtrain.sharding.layout import round_up

IGNORE_INDEX = -100

_INIT_STD = 0.02


class ModelOutput(NamedTuple):
    """What a model returns.

    ``logits`` is FP32 [B, T, vocab_size] (padding removed); ``loss`` is the FP32 mean cross entropy over the targets
    that are not ``IGNORE_INDEX`` (0 where there are none), or None without targets.
    """

    logits: Tensor
    loss: Tensor | None


def causal_lm_output(logits: Tensor, targets: Tensor | None) -> ModelOutput:
    """The output for ``logits`` [B, T, vocab_size] of any dtype and int64 ``targets`` [B, T]."""
    logits = logits.float()
    if targets is None:
        return ModelOutput(logits, None)
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return ModelOutput(logits, total / (targets != IGNORE_INDEX).sum().clamp(min=1))


def padded(vocab_size: int) -> int:
    """The rows of an embedding for ``vocab_size`` tokens."""
    return round_up(vocab_size, VOCAB_MULTIPLE)


def draw_seed() -> int:
    """A seed for :func:`init_weights`, drawn once, before any layer takes from torch's generator."""
    return int(torch.randint(2**62, (), device="cpu"))


@torch.no_grad()
def init_weights(model: nn.Module, seed: int, num_layers: int, residual: tuple[str, ...]) -> None:
    """Normal(0, 0.02); projections into the residual stream / sqrt(2 num_layers) (GPT-2, Radford et al., 2019).

    Each weight depends on the seed and its own name alone. Biases are 0; the gains of norms keep their ones.

    Args:
        model: its weights are overwritten.
        seed: of the draws.
        num_layers: whose outputs the residual stream adds up.
        residual: how the names of those projections end.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.zero_()
        if parameter.dim() == 1 or parameter.is_meta:  # on meta it has no values to draw
            continue
        std = _INIT_STD / math.sqrt(2 * num_layers) if name.endswith(residual) else _INIT_STD
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:4], "big"))
        # drawn on the CPU whatever the device of the model: the same weights everywhere
        values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu").normal_(0, std, generator=generator)
        parameter.copy_(values)


def refuse_args(config: ModelConfig) -> None:
    """Refuses the free ``model.args``, which no built-in model reads.

    Raises:
        ConfigError: there are some.
    """
    if config.args:
        raise ConfigError(
            f"model.args={dict(config.args)} would be ignored: a built-in model takes none; remove it or set "
            "model.factory=package.module:function"
        )
