"""The update of a flat FP32 arena by any rule: unscale, states, master, and the cast into the compute replica.

The arena is all that this rank holds of the flat buffers' masters, states and main grads; a segment is one buffer's
part of it. Segments are updated in several calls, so that the first groups are gathered while others are updated. A
rule may have a kernel of its own for that (:meth:`dtrain.optim.rule.Rule.segment_kernel`); else it is applied block by
block. Which one runs is chosen at the start of a run, because their bits differ in the last places. Each gives the same
bits for every cut of the arena at chunks and for any sharding. None waits for the device, which decides itself whether
an update is skipped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtrain.optim.rule import Rule, SegmentKernel, UpdateGroup, UpdateScalars, UpdateSlice

_BLOCK = 512 * 1024
"""Elements updated before they are cast, on a CPU: few enough to stay in the cache, enough to hide a call's cost."""


class FlatUpdate:
    """Applies a rule to the segments of an arena.

    Args:
        rule: the optimizer.
        segments: the slices of each segment, cut where the weight-decay class changes.

    Raises:
        ConfigError: the update is to be compiled and cannot be.
    """

    def __init__(self, rule: Rule, segments: Sequence[Sequence[UpdateSlice]]) -> None:
        self._kernel: SegmentKernel = rule.segment_kernel(segments) or BlockedUpdate(rule, segments)

    @torch.no_grad()
    def update(self, numbers: Sequence[int], scalars: UpdateScalars) -> None:
        """Updates some segments and casts them into their replicas, if these are separate.

        Main grads may be overwritten. A skipped update casts too, to the bits that the replica has.

        Args:
            numbers: ascending indices into ``segments``; on a GPU, adjacent ones are one launch.
            scalars: scalars of this update.
        """
        self._kernel.update(numbers, scalars)


class BlockedUpdate:
    """A rule applied to the segments of an arena, block by block."""

    def __init__(self, rule: Rule, segments: Sequence[Sequence[UpdateSlice]]) -> None:
        self._rule = rule
        self._segments = [[block for part in segment for block in _blocks(part)] for segment in segments]

    def update(self, numbers: Sequence[int], scalars: UpdateScalars) -> None:
        for batch in _batches([block for number in numbers for block in self._segments[number]]):
            states = tuple(map(list, zip(*(block.states for block in batch), strict=True)))
            group = UpdateGroup(batch[0].decayed, [block.master for block in batch], states)
            self._rule.apply(group, [block.main_grad for block in batch], scalars)
            for block in batch:
                if block.replica is not None:
                    block.replica.copy_(block.master)


def _batches(blocks: list[UpdateSlice]) -> list[list[UpdateSlice]]:
    """Returns the blocks of each call: one on a CPU, so that its masters are in the cache when they are cast."""
    if not blocks or blocks[0].master.device.type == "cpu":
        return [[block] for block in blocks]
    batches = [[block for block in blocks if block.decayed is decayed] for decayed in (True, False)]
    return [batch for batch in batches if batch]


def _blocks(part: UpdateSlice) -> list[UpdateSlice]:
    # uncut on a GPU, where blocks do not help
    return part.cut(_BLOCK if part.master.device.type == "cpu" else part.master.numel())
