"""The passes around an update in ``dtrain bench optimizer``: torch's sequence, and dtrain's norm and decision."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dtrain.parameters.squares import chunk_squares
from dtrain.sharding.layout import CHUNK

_MAX_NORM = 1.0


def torch_sequence(
    optimizer: torch.optim.Optimizer, replicas: list[Tensor] | tuple[Tensor, ...], grads: Sequence[Tensor]
) -> Callable[[], None]:
    """Returns a training loop's own passes around ``optimizer``, which holds the FP32 masters in one group.

    Args:
        optimizer: torch's.
        replicas: the masters are cast into them.
        grads: of any float dtype, shaped as the masters.
    """
    masters: list[nn.Parameter] = optimizer.param_groups[0]["params"]
    values = [master.detach() for master in masters]
    found_inf, inverse_scale = (torch.full((1,), value, device=masters[0].device) for value in (0.0, 1.0))

    def run() -> None:
        full = [grad.to(torch.float32) for grad in grads]  # FP32 gradients are not copied
        for master, grad in zip(masters, full, strict=True):
            master.grad = grad
        found_inf.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(full, found_inf, inverse_scale)
        nn.utils.clip_grad_norm_(masters, _MAX_NORM)
        if not found_inf.item():
            optimizer.step()
        torch._foreach_copy_(replicas, values)
        optimizer.zero_grad()

    return run


def decide(main_grad: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the divisor of ``main_grad`` [a multiple of the chunk] that clips it, and whether to skip (1.0).

    This is the engine's decision on one rank, taken on the device.
    """
    squares = chunk_squares([main_grad.view(-1, CHUNK)]).sum()
    clip = (_MAX_NORM / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    return (1 / clip).float(), squares.isfinite().logical_not().float()
