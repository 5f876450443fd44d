"""The update of a flat FP32 arena by any rules: unscale, states, master, and the cast into the compute replica.

The arena is all that this rank holds of the flat buffers' masters, states and main grads; a segment is one buffer's
part of it. Segments are updated in several calls, so that the first groups are gathered while others are updated. A
rule may have a kernel of its own for that (:meth:`dtrain.optim.rule.Rule.segment_kernel`); else it is applied block by
block. Which one runs is chosen at the start of a run, because their bits differ in the last places. Each gives the same
bits for every cut of the arena at chunks and for any sharding. None waits for the device, which decides itself whether
an update is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from dtrain.optim.average import MovingAverage
from dtrain.optim.rule import (
    ElementwiseRule,
    MatrixKernel,
    Rule,
    SegmentKernel,
    UpdateGroup,
    UpdateScalars,
    UpdateSlice,
)

Block = TypeVar("Block")

_BLOCK = 512 * 1024
"""Elements updated before they are cast, on a CPU: few enough to stay in the cache, enough to hide a call's cost."""


class FlatUpdate:
    """Applies rules to the segments of an arena, each to its own slices.

    Args:
        rules: the rules, by number.
        segments: the slices of each segment, cut where the update class changes.
        matrices: the updates of the rules that need whole matrices, by number.
        average: moving average of the same segments, if one is kept.

    Raises:
        ConfigError: the update is to be compiled and cannot be.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        segments: Sequence[Sequence[UpdateSlice]],
        matrices: Mapping[int, MatrixKernel] | None = None,
        average: MovingAverage | None = None,
    ) -> None:
        self._matrices = matrices or {}
        self._average = average
        self._kernels: list[SegmentKernel] = []
        for number, rule in enumerate(rules):
            if number in self._matrices:
                self._kernels.append(self._matrices[number])
                continue
            own = [[part for part in segment if part.update_class.rule == number] for segment in segments]
            assert isinstance(rule, ElementwiseRule)
            self._kernels.append(rule.segment_kernel(own) or BlockedUpdate(rule, own))

    def begin(self, scalars: UpdateScalars) -> None:
        """Transforms what rules need whole, before the first call of :meth:`update`; all ranks call."""
        for number, matrices in self._matrices.items():
            matrices.begin(scalars.of_rule(number))

    @torch.no_grad()
    def update(self, numbers: Sequence[int], scalars: UpdateScalars) -> None:
        """Updates some segments and casts them into their replicas, if these are separate.

        Main grads may be overwritten. A skipped update casts too, to the bits that the replica has.

        Args:
            numbers: ascending indices into ``segments``; on a GPU, adjacent ones are one launch.
            scalars: scalars of this update.
        """
        for number, kernel in enumerate(self._kernels):
            kernel.update(numbers, scalars.of_rule(number))
        if self._average is not None:
            self._average.update(numbers, scalars)


class BlockedUpdate:
    """A rule applied to the segments of an arena, block by block."""

    def __init__(self, rule: ElementwiseRule, segments: Sequence[Sequence[UpdateSlice]]) -> None:
        self._rule = rule
        self._segments = [[block for part in segment for block in _blocks(part)] for segment in segments]

    def update(self, numbers: Sequence[int], scalars: UpdateScalars) -> None:
        for batch in batches([block for number in numbers for block in self._segments[number]], lambda block: block):
            update_class = batch[0].update_class
            group = update_group(batch)
            self._rule.apply(group, [block.main_grad for block in batch], scalars.scaled(update_class.lr_factor))
            for block in batch:
                if block.replica is not None:
                    block.replica.copy_(block.master)


def batches(blocks: Sequence[Block], part_of: Callable[[Block], UpdateSlice]) -> list[list[Block]]:
    """Returns the blocks of each call: one on a CPU, so that its masters are in the cache when they are cast.

    On a GPU those of one update class.
    """
    if not blocks or part_of(blocks[0]).master.device.type == "cpu":
        return [[block] for block in blocks]
    classes = dict.fromkeys(part_of(block).update_class for block in blocks)
    return [[block for block in blocks if part_of(block).update_class == wanted] for wanted in classes]


def update_group(slices: Sequence[UpdateSlice]) -> UpdateGroup:
    """Returns slices of one update class as an argument of :meth:`ElementwiseRule.apply`."""
    return UpdateGroup(
        slices[0].update_class.weight_decay,
        [part.master for part in slices],
        tuple(map(list, zip(*(part.states for part in slices), strict=True))),
        [part.origin for part in slices],
    )


def _blocks(part: UpdateSlice) -> list[UpdateSlice]:
    # uncut on a GPU, where blocks do not help
    return part.cut(_BLOCK if part.master.device.type == "cpu" else part.master.numel())
