"""AdamW's rule; its hyper-parameters are :class:`dtrain.config.optim.AdamW`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dtrain.config.optim import AdamW
from dtrain.distributed.logging import logger
from dtrain.optim.rule import ElementwiseRule, SegmentKernel, StateSpec, UpdateGroup, UpdateScalars, UpdateSlice


class AdamWRule(ElementwiseRule):
    """AdamW by one of three implementations.

    Torch's fused kernel (``torch._fused_adamw_``) updates lists of tensors, and an arena block by block. If the update
    is compiled, an arena is updated by tensor code on a CPU and by a Triton kernel on a GPU.

    Args:
        record: hyper-parameters, with ``compile`` decided (see :func:`dtrain.optim.rules.on_device`).
    """

    states = (StateSpec("exp_avg"), StateSpec("exp_avg_sq"))

    def __init__(self, record: AdamW) -> None:
        if not isinstance(record.compile, bool):
            raise ValueError("AdamW.compile is 'auto'; call on_device first")
        self._record = record
        self.is_compiled = record.compile

    def apply(self, group: UpdateGroup, grads: list[Tensor], scalars: UpdateScalars) -> None:
        """Updates the tensors in one call of torch's fused kernel; the gradients are left divided."""
        exp_avgs, exp_avg_sqs = group.states
        lr, step, grad_divisor, found_inf = scalars.tensors
        record = self._record
        torch._fused_adamw_(
            group.masters,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            [step] * len(group.masters),  # read only: the kernel leaves counting to its caller
            lr=lr,
            beta1=record.betas[0],
            beta2=record.betas[1],
            weight_decay=group.weight_decay,
            eps=record.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=grad_divisor,
            found_inf=found_inf,
        )

    def segment_kernel(self, segments: Sequence[Sequence[UpdateSlice]]) -> SegmentKernel | None:
        """Returns the compiled kernel for the device of ``segments``, if one is asked for."""
        if not self.is_compiled:
            logger.info(
                "optimizer: AdamW by torch's fused kernel; optim.compile=true would compile it, which takes seconds"
            )
            return None
        if any(part.master.device.type == "cuda" for segment in segments for part in segment):
            from dtrain.optim.tiled import TiledAdamW  # it imports Triton, which a CPU build of torch does not have

            return TiledAdamW(self._record, segments)
        from dtrain.optim.compiled import CompiledAdamW  # which imports the record from here

        return CompiledAdamW(self._record, segments)
