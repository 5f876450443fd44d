"""Gradients on their way from backward to the main grads.

Two ways, chosen by where the gradient is placed:

- REPLICATE: micro-batches accumulate in an unsharded FP32 buffer; the sum is reduced on the last one.
- SHARD: the leaves of every micro-batch go to their owners as they are, in the replica dtype; the owner weighs and
  sums them in FP32. Half the bytes of FP32 on the wire, no rounding between ranks, and the canonical order for
  reproducible runs.

What travels is in the reduce dtype, rounded once where that is lower than what is sent; sums are FP32 always.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from dtrain.distributed.communicator import Communicator, Pending
from dtrain.parameters.gradient_monitor import GradientMonitor
from dtrain.parameters.micro_batch_weight import Weight
from dtrain.sharding.accumulate import GradientSum, RunningSum, add_scaled, assign_scaled
from dtrain.sharding.layout import FlatLayout
from dtrain.sharding.micro_batch_gradients import MAX_BYTES_IN_FLIGHT, MicroBatchGradient
from dtrain.sharding.replicas import slot_views

Weights = Callable[[], Sequence[Weight]]
"""The weights of one micro-batch on all ranks; waits for them."""


class FlatGradient(Protocol):
    """The gradient of one flat buffer."""

    reduces_every_micro_batch: bool
    transient_bytes: int  # held while a reduction is under way

    def receive(self, slot: int, grad: Tensor, weight: Weight) -> None:
        """Takes the gradient of parameter number ``slot`` of this micro-batch."""

    def complete(self) -> Sequence[Tensor]:
        """No more gradients come in this micro-batch; what is missing is zero. Returns this rank's, by slot."""

    def launch(self, weights: Weights) -> Pending:
        """Starts the reduction of what is complete."""

    def finish(self) -> Pending:
        """Completes the main grad after the last micro-batch."""


class UnshardedGradient:
    """REPLICATE: accumulates ``full`` [numel] FP32, all-reduces or reduce-scatters it once a step.

    Args:
        layout: of the flat buffer.
        comm: who takes part.
        full: the unsharded FP32 buffer, zero in its padding.
        everywhere: all ranks want the whole sum (all-reduce), not only their slice of ``full``.
        leaf: where the sum of this rank is rounded to before it travels; None: it travels in FP32.
    """

    reduces_every_micro_batch = False

    def __init__(
        self, layout: FlatLayout, comm: Communicator, full: Tensor, everywhere: bool, leaf: MicroBatchGradient | None
    ) -> None:
        self._layout = layout
        self._comm = comm
        self._full = full
        self._everywhere = everywhere
        self._leaf = leaf
        start, stop = layout.shard(comm.rank)
        self._shard = full[start:stop]
        self._sum = RunningSum(self._shard)
        self._one = Weight(torch.ones((), device=full.device), is_one=True)
        self._views = slot_views(full, layout)
        self.transient_bytes = full.nbytes if leaf is None else leaf.nbytes
        self._fresh = set(range(len(self._views)))  # slots that still hold the last step's gradient

    def receive(self, slot: int, grad: Tensor, weight: Weight) -> None:
        """Adds the weighted gradient in FP32."""
        view = self._views[slot]
        if slot in self._fresh:
            self._fresh.discard(slot)
            assign_scaled(view, grad, weight)
        else:
            add_scaled(view, grad, weight)

    def complete(self) -> Sequence[Tensor]:
        """Zeroes what got no gradient; the sums over this rank's micro-batches so far."""
        for slot in self._fresh:
            self._views[slot].zero_()
        self._fresh.clear()
        return self._views

    def launch(self, weights: Weights) -> Pending:
        """Starts the one reduction of this step."""
        self._fresh = set(range(len(self._views)))
        if self._leaf is not None:
            rounded = self._leaf.open()
            rounded.copy_(self._full)
            ones = [self._one] * self._comm.world_size
            return self._leaf.exchange(rounded, lambda rows: self._sum.push(rows, ones))
        if self._everywhere:
            return self._comm.all_reduce_sum(self._full, label=self._layout.name)
        return self._comm.reduce_scatter_sum(self._shard, self._full, label=self._layout.name)

    def finish(self) -> Pending:
        """Hands out the sum of rounded parts where all ranks want the whole."""
        if self._leaf is None:
            return Pending()
        self._sum.finish(self._shard)
        if not self._everywhere:
            return Pending()
        return self._comm.all_gather(self._full, self._shard, label=f"sum {self._layout.name}")


class ShardedGradient:
    """SHARD: sends each micro-batch's leaves to their owners, who sum them.

    Args:
        layout: of the flat buffer.
        comm: who takes part.
        buffer: where the leaves lie.
        gradient_sum: sums this rank's shard of the leaves.
        main_grad: FP32 [shard_numel], or [numel] where every rank wants the whole sum (stage 0, reproducible).
    """

    reduces_every_micro_batch = True

    def __init__(
        self,
        layout: FlatLayout,
        comm: Communicator,
        buffer: MicroBatchGradient,
        gradient_sum: GradientSum,
        main_grad: Tensor,
    ) -> None:
        self._layout = layout
        self._comm = comm
        self._buffer = buffer
        self._sum = gradient_sum
        self._main_grad = main_grad
        start, stop = layout.shard(comm.rank)
        self._shard = main_grad if main_grad.numel() == layout.shard_numel else main_grad[start:stop]
        self.transient_bytes = buffer.nbytes
        self._leaf: Tensor | None = None
        self._views: list[Tensor] = []
        self._missing = set(range(len(layout.slots)))

    def _open(self) -> Tensor:
        if self._leaf is None:
            self._leaf = self._buffer.open()
            self._views = slot_views(self._leaf, self._layout)
        return self._leaf

    def receive(self, slot: int, grad: Tensor, weight: Weight) -> None:
        """Puts the leaf, unweighted, in its place of the flat buffer."""
        self._open()
        self._views[slot].copy_(grad)
        self._missing.discard(slot)

    def complete(self) -> Sequence[Tensor]:
        """Zeroes what got no gradient; the leaf of this micro-batch."""
        self._open()
        for slot in self._missing:
            self._views[slot].zero_()
        self._missing.clear()
        return self._views

    def launch(self, weights: Weights) -> Pending:
        """Sends the leaves; when waited for, sums what came from all ranks, in rank order."""
        leaf = self._open()
        self._missing = set(range(len(self._views)))
        self._leaf, self._views = None, []
        return self._buffer.exchange(leaf, lambda rows: self._sum.push(rows, weights()))

    def finish(self) -> Pending:
        """Leaves the sum in the main grad, on every rank where the main grad is the whole buffer."""
        self._sum.finish(self._shard)
        if self._shard is self._main_grad:
            return Pending()
        return self._comm.all_gather(self._main_grad, self._shard, label=f"sum {self._layout.name}")


class GradientReducer:
    """Starts each group's reduction during backward, in one order on all ranks.

    A group is launched when its own gradients and those of all groups before it are complete, so ranks whose graphs
    differ (unused parameters, data-dependent branches) still issue the same collectives.

    Args:
        groups: the flat gradients of each group, in the order in which backward is expected to complete them.
        num_parameters: how many gradients complete each group.
        comm: who takes part.
        monitor: sees every gradient.
    """

    def __init__(
        self, groups: list[list[FlatGradient]], num_parameters: list[int], comm: Communicator, monitor: GradientMonitor
    ) -> None:
        self._groups = groups
        self._monitor = monitor
        # of each group's first parameter, in the order of backward
        self._first_numbers = list(accumulate(num_parameters, initial=0))
        self._micro_batch = 0
        self._incomplete: set[int] = set()
        self._num_parameters = num_parameters
        self._comm = comm
        self._every = any(flat.reduces_every_micro_batch for group in groups for flat in group)
        self._missing: list[set[int]] = []
        self._next = len(groups)
        self._reduce = False
        self._finished = True
        self._weights: Weights = list  # of the micro-batch; used only where every one is reduced
        self._in_flight: deque[tuple[Pending, int]] = deque()  # with the bytes that each holds
        self.micro_batch_weights: list[Tensor] = []  # [world_size] of each micro-batch of this step, if exchanged

    def begin_micro_batch(self, weight: Weight, *, number: int, last: bool) -> None:
        """Opens micro-batch ``number`` of ``weight``; ``last``: the sums are reduced after it."""
        self._micro_batch = number
        self._incomplete = set(range(len(self._groups)))
        self._missing = [set(range(number)) for number in self._num_parameters]
        self._next = 0
        self._finished = False
        self._reduce = last or self._every
        if self._every:
            row = torch.empty(self._comm.world_size, dtype=torch.float32, device=self._comm.device)
            pending = self._comm.all_gather(row, weight.value.reshape(1), label="weights")
            self._weights = cache(partial(_waited, pending, row))
            self.micro_batch_weights.append(row)

    def is_duplicate(self, group: int, parameter: int) -> bool:
        """Whether this parameter has sent its gradient of this micro-batch already."""
        return parameter not in self._missing[group]

    def complete(self, group: int, parameter: int) -> None:
        """Notes that a parameter's gradient was received, and launches what may start."""
        self._missing[group].discard(parameter)
        if not self._missing[group]:
            self._complete(group)
        while self._reduce and self._next < len(self._groups) and not self._missing[self._next]:
            self._launch_next()

    def end_micro_batch(self) -> None:
        """Launches the groups that backward left incomplete: what is missing counts as zero."""
        for group in sorted(self._incomplete):
            self._complete(group)
        while self._reduce and self._next < len(self._groups):
            self._launch_next()

    def _complete(self, group: int) -> None:
        self._incomplete.discard(group)
        number = self._first_numbers[group]
        for flat in self._groups[group]:
            grads = flat.complete()
            self._monitor.record_finiteness(
                self._micro_batch, number, grads[::-1]
            )  # backward reaches the last one first
            number += len(grads)

    def _launch_next(self) -> None:
        for flat in self._groups[self._next]:
            while self._has_enough_in_flight():
                self._in_flight.popleft()[0].wait()
            self._in_flight.append((flat.launch(self._weights), flat.transient_bytes))
        self._next += 1

    def _has_enough_in_flight(self) -> bool:
        held = sum(size for _, size in self._in_flight)
        return len(self._in_flight) >= 2 and held > MAX_BYTES_IN_FLIGHT

    def drain(self) -> None:
        """Waits for all reductions that were launched, in the order in which they were."""
        for pending, _ in self._in_flight:
            pending.proceed()  # those of two collectives start the second before any is waited for
        while self._in_flight:
            self._in_flight.popleft()[0].wait()

    def finish(self) -> None:
        """Completes the main grads of this step; a second call finds them complete."""
        if self._finished:
            return
        self._finished = True
        if not self._reduce:
            self._reduce = True
            self.end_micro_batch()
        self.drain()
        for pending in [flat.finish() for group in self._groups for flat in group]:
            pending.wait()


def _waited(pending: Pending, row: Tensor) -> list[Weight]:
    pending.wait()
    return Weight.of_ranks(row)
