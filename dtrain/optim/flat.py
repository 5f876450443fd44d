"""AdamW over a flat FP32 arena, in one pass: unscale, moments, master, and the cast into the compute replica.

The arena is updated segment by segment, so that the first groups are gathered while others are updated. One of two
implementations is chosen at the start of a run, because their bits differ in the last places: torch's fused kernel
(``torch._fused_adamw_``) block by block, so that the cast finds the masters in the cache, or compiled tensor code. Both
give the same bits for every cut of the arena at chunks and for any sharding. Neither waits for the device, which
decides itself whether an update is skipped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtrain.optim.adamw import AdamW, UpdateScalars, UpdateSlice
from dtrain.optim.compiled import CompiledAdamW
from dtrain.optim.fused import BlockedAdamW


class FlatAdamW:
    """Applies :class:`AdamW` to the segments of an arena.

    Args:
        rule: hyper-parameters, with ``compile`` decided (see :meth:`AdamW.on`).
        segments: the slices of each segment, cut where the weight-decay class changes.

    Raises:
        ConfigError: the update is to be compiled and cannot be.
    """

    def __init__(self, rule: AdamW, segments: Sequence[Sequence[UpdateSlice]]) -> None:
        if not isinstance(rule.compile, bool):
            raise ValueError("AdamW.compile is 'auto'; call AdamW.on(device) first")
        self._kernel = CompiledAdamW(rule, segments) if rule.compile else BlockedAdamW(rule, segments)

    @torch.no_grad()
    def update(self, number: int, scalars: UpdateScalars) -> None:
        """Updates segment ``number`` and casts it into its replica, if that is separate; main grads may be overwritten.

        A skipped update casts too, to the bits that the replica has.
        """
        self._kernel.update(number, scalars)
