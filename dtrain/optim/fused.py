"""AdamW by torch's fused kernel (``torch._fused_adamw_``): block by block over an arena, or over parameter lists."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dtrain.distributed.logging import logger
from dtrain.optim.adamw import AdamW, UpdateGroup, UpdateScalars, UpdateSlice
from dtrain.precision.float8.cast import E4M3, cast

_BLOCK = 512 * 1024
"""Elements updated before they are cast, on a CPU: few enough to stay in the cache, enough to hide a call's cost."""


class BlockedAdamW:
    """The fused kernel over the segments of an arena, block by block."""

    def __init__(self, rule: AdamW, segments: Sequence[Sequence[UpdateSlice]]) -> None:
        self._rule = rule
        self._segments = [[block for part in segment for block in _blocks(part)] for segment in segments]
        logger.info(
            "optimizer: AdamW by torch's fused kernel; optim.compile=true would compile it, which takes seconds"
        )

    def update(self, numbers: Sequence[int], scalars: UpdateScalars) -> None:
        """Updates the segments ``numbers``; the main grads are left divided."""
        blocks = [block for number in numbers for block in self._segments[number]]
        for batch in _batches(blocks):
            states = tuple(map(list, zip(*(block.states for block in batch), strict=True)))
            _fused(self._rule, batch[0].decayed, states, scalars)
            for block in batch:
                _cast(block)


def _batches(blocks: list[UpdateSlice]) -> list[list[UpdateSlice]]:
    """Returns the blocks of each call: one on a CPU, so that its masters are in the cache when they are cast."""
    if not blocks or blocks[0].master.device.type == "cpu":
        return [[block] for block in blocks]
    batches = [[block for block in blocks if block.decayed is decayed] for decayed in (True, False)]
    return [batch for batch in batches if batch]


def _cast(block: UpdateSlice) -> None:
    if block.replica is None:
        return
    if block.scale is None or block.amax is None:
        block.replica.copy_(block.master)
        return
    block.replica.copy_(cast(block.master, block.scale, E4M3))
    torch.maximum(block.amax, block.master.abs().amax(), out=block.amax)


def _blocks(part: UpdateSlice) -> list[UpdateSlice]:
    # uncut on a GPU, where blocks do not help
    return part.cut(_BLOCK if part.master.device.type == "cpu" else part.master.numel())


class ParameterListAdamW:
    """The fused kernel on parameters as a library holds them; the gradients are passed to each update.

    Args:
        rule: hyper-parameters; ``compile`` must not be True.
        groups: one for each weight-decay class.
    """

    def __init__(self, rule: AdamW, groups: Sequence[UpdateGroup]) -> None:
        self._rule = rule
        self._groups = [group for group in groups if group.masters]

    @property
    def groups(self) -> Sequence[UpdateGroup]:
        """The groups in the order in which :meth:`update` takes the gradients; without empty ones."""
        return self._groups

    @torch.no_grad()
    def update(self, grads: Sequence[list[Tensor]], scalars: UpdateScalars) -> None:
        """Updates all parameters, or none if ``found_inf`` is set; the gradients are left divided.

        Args:
            grads: FP32 gradients of each of ``groups``.
            scalars: scalars of this update.
        """
        for group, group_grads in zip(self._groups, grads, strict=True):
            tensors = (group.masters, group_grads, group.exp_avgs, group.exp_avg_sqs)
            _fused(self._rule, group.decayed, tensors, scalars)


def _fused(rule: AdamW, decayed: bool, tensors: tuple[list[Tensor], ...], scalars: UpdateScalars) -> None:
    masters, grads, exp_avgs, exp_avg_sqs = tensors
    lr, step, grad_divisor, found_inf = scalars.tensors
    torch._fused_adamw_(
        masters,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [step] * len(masters),  # read only: the kernel leaves counting to its caller
        lr=lr,
        beta1=rule.betas[0],
        beta2=rule.betas[1],
        weight_decay=rule.weight_decay if decayed else 0.0,
        eps=rule.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=grad_divisor,
        found_inf=found_inf,
    )
