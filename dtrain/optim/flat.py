"""The update of a flat FP32 arena by any rules: unscale, states, master, and the cast into the compute replica.

The arena is all that this rank holds of the flat buffers' masters, states and main grads; a segment is one buffer's
part of it. Segments are updated in several calls, so that the first groups are gathered while others are updated. A
rule may have a kernel of its own for that (``dtrain.optim.rule.Rule.segment_kernel``); else it is applied block by
block. Which one runs is chosen at the start of a run, because their bits differ in the last places. Each gives the same
bits for every cut of the arena at chunks and for any sharding. None waits for the device, which decides itself whether
an update is skipped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch

from dtrain.distributed.logging import logger
from dtrain.optim.average import average_kernel
from dtrain.optim.rule import (
    ElementwiseRule,
    MatrixKernel,
    Rule,
    SegmentKernel,
    UpdateClass,
    UpdateGroup,
    UpdateScalars,
    UpdateSlice,
)
from dtrain.precision.remainder import RemainderPair, read

Block = TypeVar("Block")

BLOCK = 512 * 1024
"""Elements updated before they are cast, on a CPU: few enough to stay in the cache, enough to hide a call's cost."""

_COPIED_BLOCK = 128 * 1024
"""The same where FP32 copies of masters or main grads are made, which a call reads and writes several times."""

COPIED = 1 << 24
"""Elements in one call on a GPU of which FP32 copies are made: a copy takes 64 MiB."""


class FlatUpdate:
    """Applies rules to the segments of an arena, each to its own slices.

    [Note: parameters apart] A parameter that has missed updates has a bias correction of its own, and one that misses
    this update is left alone (``UpdateScalars.others``). The first time, the slices are cut around it, and stay so.
    A rule that is applied block by block is called once for all blocks with the same scalars; a kernel of a rule's own
    is built once more for each such parameter. Without such parameters there is nothing of this.

    Args:
        rules: the rules, by number.
        segments: the slices of each segment, cut where the update class changes.
        matrices: the updates of the rules that need whole matrices, by number.
        ema_decay: of the slices' averages; None if there are none.

    Raises:
        ConfigError: the update is to be compiled and cannot be.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        segments: Sequence[Sequence[UpdateSlice]],
        matrices: Mapping[int, MatrixKernel] | None = None,
        ema_decay: float | None = None,
    ) -> None:
        self._rules, self._segments, self._ema_decay = rules, segments, ema_decay
        self._matrices = matrices or {}
        started = time.perf_counter()
        self._together: list[_Kernel] = []
        self._apart: dict[str, list[_Kernel]] = {}  # by the parameters that have been apart
        self._build(())
        for rule in rules:
            if rule.description:
                logger.info("optimizer: %s", rule.description.format(seconds=time.perf_counter() - started))

    def _build(self, names: Collection[str]) -> None:
        """Builds the kernels, for the parameters called ``names`` apart too."""
        self._together = []
        self._apart |= {name: [] for name in names}
        parts = [[part for whole in segment for part in whole.split_at(self._apart)] for segment in self._segments]
        for number, rule in enumerate(self._rules):
            own = [[part for part in segment if part.update_class.rule == number] for segment in parts]
            if number not in self._matrices and any(own):
                assert isinstance(rule, ElementwiseRule)
                if not self._add(number, own, rule.segment_kernel, names):
                    self._together.append((number, BlockedUpdate(rule, own)))
        if self._ema_decay is not None:
            is_compiled = any(rule.is_compiled for rule in self._rules)
            self._add(None, parts, partial(average_kernel, self._ema_decay, is_compiled=is_compiled), names)

    def _add(
        self,
        rule: int | None,
        parts: Sequence[Sequence[UpdateSlice]],
        build: Callable[[Sequence[Sequence[UpdateSlice]]], SegmentKernel | None],
        names: Collection[str],
    ) -> bool:
        """Adds a kernel for what lies together, and one for each of ``names``; whether there are such kernels."""
        kernel = build([[part for part in segment if not part.name] for segment in parts])
        if kernel is None:
            return False
        self._together.append((rule, kernel))
        for name in sorted({part.name for segment in parts for part in segment if part.name in names}):
            own = build([[part for part in segment if part.name == name] for segment in parts])
            assert own is not None
            self._apart[name].append((rule, own))
        return True

    def begin(self, scalars: UpdateScalars) -> None:
        """Transforms what rules need whole, before the first call of ``update``; all ranks call."""
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
        if new := scalars.others.keys() - self._apart.keys():
            self._build(new)
        for number, matrices in self._matrices.items():  # before the averages
            matrices.update(numbers, scalars.of_rule(number))
        _run(self._together, numbers, scalars)
        for name, kernels in self._apart.items():
            own = scalars.others.get(name, scalars)
            if own is not None:
                _run(kernels, numbers, own)


_Kernel = tuple[int | None, SegmentKernel]
"""A kernel with the number of its rule; None: the average's."""


def _run(kernels: Sequence[_Kernel], numbers: Sequence[int], scalars: UpdateScalars) -> None:
    for rule, kernel in kernels:
        kernel.update(numbers, scalars if rule is None else scalars.of_rule(rule))


class BlockedUpdate:
    """A rule applied to the segments of an arena, block by block."""

    def __init__(self, rule: ElementwiseRule, segments: Sequence[Sequence[UpdateSlice]]) -> None:
        self._rule = rule
        self._segments = [[block for part in segment for block in _blocks(part)] for segment in segments]

    def update(self, numbers: Sequence[int], scalars: UpdateScalars) -> None:
        chosen = [block for number in numbers for block in self._segments[number]]
        for own, blocks in scalars.split(chosen, lambda block: block.name):
            for batch in batches(blocks, lambda block: block):
                group = update_group(batch)
                # a BF16 main grad is widened, which copies it
                grads = [block.main_grad.float() for block in batch]
                self._rule.apply(group, grads, own.scaled(batch[0].update_class.lr_factor))
                store(batch, group)


def batches(blocks: Sequence[Block], part_of: Callable[[Block], UpdateSlice]) -> list[list[Block]]:
    """Returns the blocks of each call, which are of one update class.

    On a CPU a call has about ``BLOCK`` elements, so that masters are in the cache when they are cast. On a GPU it
    has all; if FP32 copies are made, about ``COPIED``, because a call needs memory for all of its copies.
    """
    calls: dict[tuple[UpdateClass, int], list[Block]] = {}
    total = 0.0
    for block in blocks:
        part = part_of(block)
        total += part.master.numel() / _limit(part)
        calls.setdefault((part.update_class, int(total)), []).append(block)
    return list(calls.values())


def _limit(part: UpdateSlice) -> float:
    """Returns about how many elements a call may have."""
    if part.master.device.type == "cpu":
        return _COPIED_BLOCK if part.needs_copy else BLOCK
    return COPIED if part.needs_copy else math.inf


def update_group(slices: Sequence[UpdateSlice]) -> UpdateGroup:
    """Returns slices of one update class as an argument of ``ElementwiseRule.apply``; call ``store`` after it.

    The masters of a pair are formed in new memory.
    """
    return UpdateGroup(
        slices[0].update_class.weight_decay,
        [read(part.master) for part in slices],
        tuple(map(list, zip(*(part.states for part in slices), strict=True))),
        [part.origin for part in slices],
    )


def store(slices: Sequence[UpdateSlice], group: UpdateGroup) -> None:
    """Casts the updated masters of ``group``, which was made from ``slices``, into the replicas, and writes pairs."""
    for part, master in zip(slices, group.masters, strict=True):
        if isinstance(part.master, RemainderPair):
            part.master.write(master)
        elif part.replica is not None:
            part.replica.copy_(master)


def _blocks(part: UpdateSlice) -> list[UpdateSlice]:
    # uncut on a GPU, where blocks do not help, except to bound the memory of copies
    return part.cut(int(min(_limit(part), max(part.master.numel(), 1))))
