"""Shared parts of the built-in language models: output and loss, vocabulary padding, and initialization.

The vocabulary is padded to a multiple of 64 for the Tensor Cores. The logits of the padding are cut off before the loss
and before sampling.
"""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dtrain.config.model import VOCAB_MULTIPLE
from dtrain.sharding.layout import round_up
from dtrain.tasks import IGNORE_INDEX

_INIT_STD = 0.02


class ModelOutput(NamedTuple):
    """Output of a causal language model.

    Attributes:
        logits: FP32 [B, T, vocab_size], without the padding; None in training by chunks (``model.loss_chunk``).
        loss: FP32 mean cross entropy over the targets that are not ``IGNORE_INDEX`` (0 if there are none), or None
            without targets.
    """

    logits: Tensor | None
    loss: Tensor | None


def causal_lm_output(
    logits: Tensor, targets: Tensor | None, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> ModelOutput:
    """Returns FP32 logits and the loss for ``logits`` [B, T, vocab_size] of any dtype and int64 ``targets`` [B, T].

    ``label_smoothing`` is that of ``F.cross_entropy``; ``z_loss`` is the coefficient of the mean squared logarithm of
    the softmax's denominator (Chowdhery et al., 2022).
    """
    logits = logits.float()
    if targets is None:
        return ModelOutput(logits, None)
    counted = targets != IGNORE_INDEX
    count = counted.sum().clamp(min=1)
    # not reduction="mean", which is NaN if all targets are ignored
    total = F.cross_entropy(
        logits.flatten(0, 1),
        targets.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    if z_loss:
        total = total + z_loss * logits.logsumexp(-1).square().where(counted, 0).sum()
    return ModelOutput(logits, total / count)


def padded_vocab_size(vocab_size: int) -> int:
    return round_up(vocab_size, VOCAB_MULTIPLE)


def draw_init_seed() -> int:
    """Draws the seed for ``init_weights``; call it before a layer draws from torch's generator."""
    return int(torch.randint(2**62, (), device="cpu"))


class SkipDraws(TorchFunctionMode):
    """Context in which new layers keep their memory as it is: ``init_weights`` would draw every weight again."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (nn.init.kaiming_uniform_, nn.init.normal_):
            return None
        return func(*args, **(kwargs or {}))


def init_weights(model: nn.Module, seed: int, num_layers: int, residual: tuple[str, ...]) -> None:
    """Initializes weights as GPT-2 does (Radford et al., 2019).

    Weights are Normal(0, 0.02); projections into the residual stream are divided by sqrt(2 num_layers). Each weight
    depends only on the seed and its own name. Biases are 0; the weights of norms stay 1.

    Args:
        residual: suffixes of the names of the projections into the residual stream.
    """

    def initialize(name: str, values: Tensor) -> None:
        if name.endswith(".bias"):
            values.zero_()
        if values.dim() == 1 or values.is_meta:  # meta parameters have no values
            return
        std = _INIT_STD / math.sqrt(2 * num_layers) if name.endswith(residual) else _INIT_STD
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        # a generator for each name: the weights do not depend on the order or number of the others
        generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:4], "big"))
        # drawn on the CPU, so that the weights are the same on every device
        in_place = values.device.type == "cpu" and values.dtype == torch.float32
        drawn = values if in_place else torch.empty(values.shape, dtype=torch.float32, device="cpu")
        drawn.normal_(0, std, generator=generator)
        if not in_place:
            values.copy_(drawn)

    # one thread draws about 100 million weights a second; detached, because grad mode is a thread's own
    names, values = zip(*((name, parameter.detach()) for name, parameter in model.named_parameters()), strict=True)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(initialize, names, values))
