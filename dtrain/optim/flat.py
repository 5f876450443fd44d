"""AdamW over a flat FP32 arena, in one pass: unscale, moments, master, and the cast into the compute replica.

The arena is updated segment by segment, so that the first groups are gathered while others are updated. One of three
implementations is chosen at the start of a run, because their bits differ in the last places: torch's fused kernel
(``torch._fused_adamw_``), or, if the update is compiled, tensor code on a CPU and a Triton kernel on a GPU. Each gives
the same bits for every cut of the arena at chunks and for any sharding. None waits for the device, which decides itself
whether an update is skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dtrain.optim.adamw import AdamW, UpdateScalars, UpdateSlice
from dtrain.optim.compiled import CompiledAdamW
from dtrain.optim.fused import BlockedAdamW

if TYPE_CHECKING:
    from dtrain.optim.tiled import TiledAdamW


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
        self._kernel = _kernel(rule, segments)

    @torch.no_grad()
    def update(self, numbers: Sequence[int], scalars: UpdateScalars) -> None:
        """Updates the segments ``numbers``, which ascend, and casts them into their replicas, if these are separate.

        Main grads may be overwritten. A skipped update casts too, to the bits that the replica has.
        """
        self._kernel.update(numbers, scalars)


def _kernel(rule: AdamW, segments: Sequence[Sequence[UpdateSlice]]) -> BlockedAdamW | CompiledAdamW | TiledAdamW:
    if not rule.compile:
        return BlockedAdamW(rule, segments)
    if any(part.master.device.type == "cuda" for segment in segments for part in segment):
        from dtrain.optim.tiled import TiledAdamW  # it imports Triton, which a CPU build of torch does not have

        return TiledAdamW(rule, segments)
    return CompiledAdamW(rule, segments)
