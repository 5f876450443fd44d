"""Sums of gradient leaves, in FP32 always.

Rounding errors of a sum of n terms grow with the depth of the summation: n for a running sum, log2(n) for a balanced
tree (Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., section 4.2).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


def scaled_fp32(leaf: Tensor, weight: Tensor) -> Tensor:
    """``leaf`` times ``weight`` (0-dim FP32) in FP32, never rounded to the leaf's dtype; maybe ``leaf`` itself."""
    if is_one(weight):
        return leaf.float()
    return torch.mul(leaf, weight) if leaf.dtype == torch.float32 else leaf.float().mul_(weight)


def assign_scaled(target: Tensor, leaf: Tensor, weight: Tensor) -> None:
    """``target`` (FP32) becomes ``leaf`` times ``weight``."""
    target.copy_(leaf)
    if not is_one(weight):
        target.mul_(weight)


def is_one(weight: Tensor) -> bool:
    """Whether a pass over memory can be saved; on a GPU the question would cost more than the pass."""
    return weight.device.type == "cpu" and weight.item() == 1.0


class LeafSum(Protocol):
    """Adds up the leaves of one shard over one step."""

    def push(self, leaf: Tensor, weight: Tensor) -> None:
        """Takes the next leaf [n], in order of the micro-batches' global index."""

    def finish(self, output: Tensor) -> None:
        """Leaves the sum in ``output`` [n] FP32 and starts anew."""


class RunningSum:
    """Adds every leaf to the main grad as it arrives; no memory of its own."""

    def __init__(self, main_grad: Tensor) -> None:
        self._main_grad = main_grad
        self._empty = True

    def push(self, leaf: Tensor, weight: Tensor) -> None:
        """Adds the leaf; the first of a step overwrites what the last step left."""
        if self._empty:
            assign_scaled(self._main_grad, leaf, weight)
            self._empty = False
        else:
            self._main_grad.add_(scaled_fp32(leaf, weight))

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

    def push(self, leaf: Tensor, weight: Tensor) -> None:
        """Takes the next leaf and carries."""
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
