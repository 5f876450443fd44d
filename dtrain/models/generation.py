"""Text from a language model, one token at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def generate(
    model_forward: Callable[[Tensor], Any],
    tokens: Tensor,
    num_tokens: int,
    max_seq_len: int,
    generator: torch.Generator,
    temperature: float = 0.8,
) -> Tensor:
    """Appends ``num_tokens`` sampled tokens to each row of ``tokens``.

    Args:
        model_forward: maps int64 [B, T] to an object with ``logits`` [B, T, vocab_size]. Put the model in eval mode.
        tokens: int64 [B, T], T at least 1: the prompt.
        num_tokens: tokens to append.
        max_seq_len: the model sees at most this many of the last tokens.
        generator: decides every draw, on its own device.
        temperature: divides the logits; below 1 the model keeps closer to its best guess.

    Returns:
        int64 [B, T + num_tokens].
    """
    for _ in range(num_tokens):
        logits = model_forward(tokens[:, -max_seq_len:]).logits[:, -1].float()
        probabilities = torch.softmax(logits / temperature, dim=-1).to(generator.device)
        drawn = torch.multinomial(probabilities, num_samples=1, generator=generator)
        tokens = torch.cat((tokens, drawn.to(tokens.device)), dim=1)
    return tokens
