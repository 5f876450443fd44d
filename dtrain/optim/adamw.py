"""AdamW over flat FP32 tensors.

The arena is updated segment by segment, so that the first groups travel while others are updated. The arithmetic is
torch's own fused kernel (``torch._fused_adamw_``): it runs at memory speed, and over stretches of whole chunks it gives
the same bits however the arena is sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dtrain.errors import ConfigError
from dtrain.sharding.buffer import UpdateSlice


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019, algorithm 2).

    Attributes:
        lr: peak learning rate; a schedule scales it.
        betas: decay rates of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled; not applied to parameters of one dimension or none (norms, biases).
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"AdamW betas must be two numbers from 0 to below 1; got {self.betas}")
        for name in ("lr", "eps", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"AdamW {name} must be at least 0; got {getattr(self, name)}")


@dataclass(frozen=True)
class UpdateScalars:
    """What all segments of one update share; 0-dim FP32 tensors on the device, but for ``lr``.

    Attributes:
        lr: learning rate of this update.
        step: number of this update, counted from 1, for the bias correction.
        grad_divisor: what the main grads are divided by: loss scale x sum of weights / clip coefficient.
        found_inf: 0; the vote has decided before.
    """

    lr: float
    step: Tensor
    grad_divisor: Tensor
    found_inf: Tensor

    @staticmethod
    def of(*, lr: float, step: int, grad_divisor: float, device: torch.device) -> UpdateScalars:
        """From Python numbers; filled on the device, so nothing waits for a copy."""
        fill = partial(torch.full, (), dtype=torch.float32, device=device)
        return UpdateScalars(lr, fill(float(step)), fill(grad_divisor), fill(0.0))


class FlatAdamW:
    """Applies :class:`AdamW` to the segments of an arena.

    Args:
        rule: hyper-parameters.
        segments: each a list of slices, cut where the weight-decay class changes.
    """

    def __init__(self, rule: AdamW, segments: Sequence[Sequence[UpdateSlice]]) -> None:
        self._rule = rule
        self._segments = segments

    def update(self, number: int, scalars: UpdateScalars) -> None:
        """One update of segment ``number``; its main grads are left divided."""
        rule = self._rule
        for part in self._segments[number]:
            torch._fused_adamw_(
                [part.master],
                [part.main_grad],
                [part.exp_avg],
                [part.exp_avg_sq],
                [],
                [scalars.step],
                lr=scalars.lr,
                beta1=rule.betas[0],
                beta2=rule.betas[1],
                weight_decay=rule.weight_decay if part.decayed else 0.0,
                eps=rule.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=scalars.grad_divisor,
                found_inf=scalars.found_inf,
            )
