"""Single-process training as a user of plain PyTorch writes it: autocast, fused AdamW, clipping.

The baseline of ``dtrain bench``, and the code that its peers share. It uses nothing of dtrain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Settings:
    """Settings that all peers share; ``bf16`` means BF16 arithmetic over FP32 weights, in the peer's own way."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float | None
    bf16: bool
    micro_batch_size: int
    device: torch.device


@dataclass(frozen=True)
class Training:
    """A peer that is ready to train.

    Attributes:
        step: returns this rank's loss, which the host need not read.
        tensors: returns the model states by kind.
    """

    step: Callable[[Batch], Tensor]
    tensors: Callable[[], dict[str, list[Tensor]]]


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Returns parameter groups for an optimizer; norms and biases are not decayed."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    groups = decay_groups(model, settings.weight_decay)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


def states(model: nn.Module, optimizer: torch.optim.Optimizer, grads: Iterable[Tensor] = ()) -> dict[str, list[Tensor]]:
    """Returns the tensors of ``model`` and ``optimizer`` by kind, with gradients ``grads`` that neither of them holds.

    Weights are the parameters and the tensors that the optimizer keeps moments for. FP32 ones count as masters, those
    of a lower precision as compute replicas.
    """
    weights: list[Tensor] = list(dict.fromkeys([*model.parameters(), *optimizer.state]))
    return {
        "compute": [weight for weight in weights if weight.dtype != torch.float32],
        "master": [weight for weight in weights if weight.dtype == torch.float32],
        "moments": [value for held in optimizer.state.values() for value in held.values() if isinstance(value, Tensor)],
        "main_grad": [weight.grad for weight in weights if weight.grad is not None] + list(grads),
        "buffers": list(model.buffers()),
    }


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, settings: Settings) -> Callable[[Batch], Tensor]:
    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(settings.device.type, dtype=torch.bfloat16, enabled=settings.bf16):
            loss: Tensor = model(**batch).loss
        loss.backward()
        if settings.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        return loss.detach()

    return step


def prepare(model: nn.Module, settings: Settings) -> Training:
    """Takes ``model`` on its device."""
    optimizer = make_optimizer(model, settings)
    return Training(make_step(model, optimizer, settings), lambda: states(model, optimizer))
