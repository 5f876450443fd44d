"""Sums of unreduced gradients, always in FP32.

Rounding errors of a sum of n terms grow with the depth of the summation: n for a running sum, log2(n) for a balanced
tree (Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., section 4.2).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from dtrain.distributed.communicator import GradientHandle
from dtrain.parameters.micro_batch_weight import RankWeights, Weight, joined
from dtrain.precision.fake import block_starts, is_fake
from dtrain.precision.hardware import has_compiler
from dtrain.sharding.layout import CHUNK

_CPU_BLOCK = 1 << 17  # elements that are summed at a time: they stay in a core's cache


def add_scaled(targets: list[Tensor], grads: list[Tensor], weight: Weight, *, is_first: bool = False) -> None:
    """Adds ``grads`` times ``weight``, FP32 products, to ``targets`` (FP32); the first ones overwrite them."""
    if is_first:
        torch._foreach_copy_(targets, grads)
        if not weight.is_one:
            torch._foreach_mul_(targets, weight.value)
    elif weight.is_one:
        torch._foreach_add_(targets, grads)
    else:  # widened first: a product in BF16 would be rounded
        torch._foreach_add_(targets, torch._foreach_mul([grad.float() for grad in grads], weight.value))


class GradientSum(ABC):
    """Sums a shard's gradients over one step.

    Args:
        main_grad: [n]; FP32 unless a class says otherwise.

    Attributes:
        norms: of the sum's chunks in FP32, if they were taken while it was in the cache.
    """

    norms: Tensor | None = None

    def __init__(self, main_grad: Tensor) -> None:
        self._main_grad = main_grad
        self._empty = True
        self._rank_weights = RankWeights(torch.empty(0))  # the last ones; most micro-batches bring the same tensor

    def receive(self, handle: GradientHandle, *, is_last: bool) -> Tensor:
        """Waits for what ``handle`` brings, adds it, and releases it; returns the ranks' weights [world_size]."""
        shards, weights = handle.wait()
        if weights is not self._rank_weights.row:
            self._rank_weights = RankWeights(weights)
        self.push(shards, self._rank_weights, is_last=is_last)
        handle.release()
        return weights

    @abstractmethod
    def push(self, grads: Sequence[Tensor], weights: Sequence[Weight], *, is_last: bool = False) -> None:
        """Adds the next gradients [n] times ``weights``; the first ones of a step overwrite the last step's sum."""

    def finish(self) -> None:
        """Completes the sum, zero if nothing was added, and starts the next step."""
        if self._empty:
            self._main_grad.zero_()
            self.norms = None
        self._empty = True


class RunningSum(GradientSum):
    """Adds each gradient to the main grad as it arrives."""

    def __init__(self, main_grad: Tensor) -> None:
        super().__init__(main_grad)
        self._is_cpu = main_grad.device.type == "cpu"
        self._adds_rows = main_grad.device.type == "cuda" and has_compiler(main_grad.device)
        # block by block on a CPU, so that the main grad goes through memory once
        self._block = _CPU_BLOCK if self._is_cpu else max(main_grad.numel(), 1)

    @cached_property
    def _blocks(self) -> list[Tensor]:
        """The blocks of the main grad, cut once: a view takes as long as the sum of a small shard."""
        starts = block_starts(self._main_grad, self._block)
        return [self._main_grad[start : start + self._block] for start in starts]

    @cached_property
    def _chunks(self) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Memory for the norms of all chunks; and for each block its chunks, and their part of that memory."""
        norms = torch.empty(self._main_grad.numel() // CHUNK)
        rows = [block.view(-1, CHUNK) for block in self._blocks]
        return norms, list(zip(rows, norms.split(self._block // CHUNK), strict=False))  # a fake one has fewer blocks

    def push(self, grads: Sequence[Tensor], weights: Sequence[Weight], *, is_last: bool = False) -> None:
        numel = self._main_grad.numel()
        if is_fake(self._main_grad):  # the other ranks' take the same memory, one after the other
            grads, weights = grads[:3], weights[:3]
        self.norms, chunks = self._chunks if is_last and self._is_cpu else (None, [])
        if self._adds_rows and len(grads) > 1:
            from dtrain.kernels.rows import add_rows  # it imports Triton, which a CPU build of torch does not have

            # the rows of one buffer, as a GPU receives them: one launch for any number of ranks
            stride = int(grads[1].storage_offset() - grads[0].storage_offset())
            rows = grads[0].as_strided((len(grads), numel), (stride, 1))
            add_rows(self._main_grad, rows, joined(weights), overwrites=self._empty)
            self._empty = False
            return
        grads, weights, size = list(grads), list(weights), self._block  # a slice of a row is an operation
        # the sum of two FP32 terms takes one pass, with the bits of a copy and an addition
        is_pair = self._empty and len(grads) > 1 and grads[0].dtype == torch.float32 and all(w.is_one for w in weights)
        num_assigned = 2 if is_pair else int(self._empty)
        for number, target in enumerate(self._blocks):
            parts = grads if numel <= size else [grad[number * size : (number + 1) * size] for grad in grads]
            if is_pair:
                torch.add(parts[0], parts[1], out=target)
            elif self._empty:
                add_scaled([target], parts[:1], weights[0], is_first=True)
            for part, weight in zip(parts[num_assigned:], weights[num_assigned:], strict=True):
                add_scaled([target], [part], weight)
            if chunks:
                rows, norms = chunks[number]
                torch.linalg.vector_norm(rows, dim=1, out=norms)
        self._empty = False


class TreeSum(GradientSum):
    """Forms the sum along one balanced binary tree, which depends only on the number of gradients.

    A binary counter over aligned power-of-two blocks: level k holds the sum of 2^k consecutive gradients; two blocks of
    a level merge into the next. Leftovers merge right to left. So any split of the same gradients over ranks gives the
    same bits.
    """

    def __init__(self, main_grad: Tensor) -> None:
        super().__init__(main_grad)
        self._levels: list[Tensor | None] = []

    def push(self, grads: Sequence[Tensor], weights: Sequence[Weight], *, is_last: bool = False) -> None:
        """Adds the next gradients, in the order of the micro-batches' global index."""
        for grad, weight in zip(grads, weights, strict=True):
            self._push(grad, weight)

    def _push(self, grad: Tensor, weight: Weight) -> None:
        carry = torch.empty_like(grad, dtype=torch.float32)
        add_scaled([carry], [grad], weight, is_first=True)
        for level, block in enumerate(self._levels):
            if block is None:
                self._levels[level] = carry
                return
            carry = block.add_(carry)  # the earlier block on the left, always
            self._levels[level] = None
        self._levels.append(carry)

    def finish(self) -> None:
        total: Tensor | None = None
        for block in self._levels:  # the lowest level first: it holds the latest gradients
            if block is not None:
                total = block if total is None else block.add_(total)
        self._levels.clear()
        if total is None:
            self._main_grad.zero_()
        else:
            self._main_grad.copy_(total)
