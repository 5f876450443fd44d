"""torch's fused AdamW kernel (``torch._fused_adamw_``): block by block over an arena, or over lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dtrain.distributed.logging import logger
from dtrain.optim.adamw import AdamW, UpdateGroup, UpdateScalars, UpdateSlice
from dtrain.precision.float8.cast import E4M3, cast

_BLOCK = 512 * 1024
"""Elements updated before they are cast, on a CPU: they must stay in the cache, and hide what a call costs."""


class BlockedAdamW:
    """torch's fused kernel, block by block."""

    def __init__(self, rule: AdamW, segments: Sequence[Sequence[UpdateSlice]]) -> None:
        self._rule = rule
        self._segments = [[block for part in segment for block in _blocks(part)] for segment in segments]
        logger.info(
            "optimizer: AdamW by torch's fused kernel; optim.compile=true would compile it, which takes seconds"
        )

    def update(self, number: int, scalars: UpdateScalars) -> None:
        """See :meth:`FlatAdamW.update`; the main grads are left divided."""
        for block in self._segments[number]:
            _fused(self._rule, block.decayed, tuple([tensor] for tensor in block.states), scalars)
            _cast(block)


def _cast(block: UpdateSlice) -> None:
    if block.replica is None:
        return
    if block.scale is None or block.amax is None:
        block.replica.copy_(block.master)
        return
    block.replica.copy_(cast(block.master, block.scale, E4M3))
    torch.maximum(block.amax, block.master.abs().amax(), out=block.amax)


def _blocks(part: UpdateSlice) -> list[UpdateSlice]:
    """``part`` in blocks; in one piece on a GPU, which has no use for them."""
    return part.cut(_BLOCK if part.master.device.type == "cpu" else part.master.numel())


class ParameterListAdamW:
    """torch's fused kernel on the tensors as a library below holds them; the gradients are given with each update.

    Args:
        rule: hyper-parameters; ``compile`` must not be True.
        lists: one for each weight-decay class.
    """

    def __init__(self, rule: AdamW, lists: Sequence[UpdateGroup]) -> None:
        self._rule = rule
        self._lists = [part for part in lists if part.masters]

    @property
    def lists(self) -> Sequence[UpdateGroup]:
        """What is updated, in the order in which :meth:`update` takes the gradients."""
        return self._lists

    @torch.no_grad()
    def update(self, grads: Sequence[list[Tensor]], scalars: UpdateScalars) -> None:
        """One update of all; nothing changes where ``found_inf`` is set. The gradients are left divided.

        Args:
            grads: FP32, for each of ``lists`` in its order.
            scalars: of this update.
        """
        for part, own in zip(self._lists, grads, strict=True):
            _fused(self._rule, part.decayed, (part.masters, own, part.exp_avgs, part.exp_avg_sqs), scalars)


def _fused(rule: AdamW, decayed: bool, tensors: tuple[list[Tensor], ...], scalars: UpdateScalars) -> None:
    masters, grads, exp_avgs, exp_avg_sqs = tensors
    torch._fused_adamw_(
        masters,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [scalars.step] * len(masters),
        lr=scalars.lr,
        beta1=rule.betas[0],
        beta2=rule.betas[1],
        weight_decay=rule.weight_decay if decayed else 0.0,
        eps=rule.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=scalars.grad_divisor,
        found_inf=scalars.found_inf,
    )
