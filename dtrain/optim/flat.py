"""AdamW over a flat FP32 arena, in one pass: unscale, moments, master, and the cast into the compute replica.

The arena is updated segment by segment, so that the first groups travel while others are updated. There are two ways,
one of which is chosen at the start of a run (their bits differ in the last places): torch's own fused kernel
(``torch._fused_adamw_``) block by block, so that the cast finds the masters in the cache, and plain tensor code that is
compiled. Both give the same bits however the arena is cut at chunks or sharded, and neither asks the device anything:
whether an update is skipped is decided there.
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
        segments: each a list of slices, cut where the weight-decay class changes.

    Raises:
        ConfigError: the update is to be compiled and cannot be.
    """

    def __init__(self, rule: AdamW, segments: Sequence[Sequence[UpdateSlice]]) -> None:
        if not isinstance(rule.compile, bool):
            raise ValueError("AdamW.compile is 'auto'; call AdamW.on(device) first")
        self._way = CompiledAdamW(rule, segments) if rule.compile else BlockedAdamW(rule, segments)

    @torch.no_grad()
    def update(self, number: int, scalars: UpdateScalars) -> None:
        """One update of segment ``number`` and the cast into its replica, if it has one; the main grads are used up.

        A skipped update casts too: the replica gets the bits that it has.
        """
        self._way.update(number, scalars)
