"""Single-process training as a user of plain PyTorch writes it: autocast, fused AdamW, clipping.

The yardstick of ``dtrain bench``; it uses nothing of dtrain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn


def make_optimizer(
    model: nn.Module, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """AdamW on the FP32 weights; norms and biases are not decayed."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[dict[str, Tensor]],
    bf16: bool,
    max_grad_norm: float | None,
) -> Iterator[float]:
    """Trains on ``batches``, one a step, and yields the loss of each step."""
    device_type = next(model.parameters()).device.type
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=torch.bfloat16, enabled=bf16):
            loss = model(**batch).loss
        loss.backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        yield loss.item()
