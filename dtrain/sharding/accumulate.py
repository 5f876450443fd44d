"""Sums of gradient leaves, in FP32 always.

Rounding errors of a sum of n terms grow with the depth of the summation: n for a running sum, log2(n) for a balanced
tree (Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., section 4.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dtrain.parameters.micro_batch_weight import Weight

_CPU_BLOCK = 1 << 17  # elements that are summed at a time: they stay in a core's cache


def add_scaled(target: Tensor, leaf: Tensor, weight: Weight) -> None:
    """``target`` (FP32) grows by ``leaf`` times ``weight``, a product in FP32 never rounded to the leaf's dtype."""
    target.add_(leaf if weight.is_one else leaf.float() * weight.value)


def assign_scaled(target: Tensor, leaf: Tensor, weight: Weight) -> None:
    """``target`` (FP32) becomes ``leaf`` times ``weight``."""
    target.copy_(leaf)
    if not weight.is_one:
        target.mul_(weight.value)


class GradientSum(Protocol):
    """Adds up the leaves of one shard over one step."""

    def push(self, leaves: Sequence[Tensor], weights: Sequence[Weight]) -> None:
        """Takes the next leaves [n], in order of the micro-batches' global index."""

    def finish(self, output: Tensor) -> None:
        """Leaves the sum in ``output`` [n] FP32 and starts anew."""


class RunningSum:
    """Adds every leaf to the main grad as it arrives; no memory of its own."""

    def __init__(self, main_grad: Tensor) -> None:
        self._main_grad = main_grad
        self._empty = True

    def push(self, leaves: Sequence[Tensor], weights: Sequence[Weight]) -> None:
        """Adds the leaves; the first of a step overwrites what the last step left.

        On CPU block by block, so that the main grad goes through memory once.
        """
        numel = self._main_grad.numel()
        size = _CPU_BLOCK if self._main_grad.device.type == "cpu" else max(numel, 1)
        for start in range(0, numel, size):
            block = slice(start, start + size)
            target = self._main_grad[block]
            for number, (leaf, weight) in enumerate(zip(leaves, weights, strict=True)):
                if number == 0 and self._empty:
                    assign_scaled(target, leaf[block], weight)
                else:
                    add_scaled(target, leaf[block], weight)
        self._empty = False

    def finish(self, output: Tensor) -> None:
        """The sum is in place already."""
        if self._empty:
            output.zero_()
        self._empty = True


class TreeSum:
    """Sums along one balanced binary tree that depends only on the number of leaves.

    A binary counter over aligned power-of-two blocks: level k holds the sum of 2^k consecutive leaves; two blocks of a
    level merge into the next. Leftovers merge right to left. So any split of the same leaves over ranks gives the
    same bits.
    """

    def __init__(self) -> None:
        self._levels: list[Tensor | None] = []

    def push(self, leaves: Sequence[Tensor], weights: Sequence[Weight]) -> None:
        """Takes the next leaves and carries."""
        for leaf, weight in zip(leaves, weights, strict=True):
            self._push(leaf, weight)

    def _push(self, leaf: Tensor, weight: Weight) -> None:
        carry = torch.empty_like(leaf, dtype=torch.float32)
        assign_scaled(carry, leaf, weight)
        for level, block in enumerate(self._levels):
            if block is None:
                self._levels[level] = carry
                return
            carry = block.add_(carry)
            self._levels[level] = None
        self._levels.append(carry)

    def finish(self, output: Tensor) -> None:
        """Merges what is left, the latest leaves first."""
        total: Tensor | None = None
        for block in self._levels:
            if block is not None:
                total = block if total is None else block.add_(total)
        self._levels.clear()
        if total is None:
            output.zero_()
        else:
            output.copy_(total)
