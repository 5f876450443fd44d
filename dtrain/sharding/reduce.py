"""Reduction of gradients: what a parameter group does when its gradients of a micro-batch are complete.

There are two kinds, chosen by the gradient's placement:

- REPLICATE: micro-batches accumulate in an unsharded FP32 buffer, whose sum is reduced after the last one.
- SHARD: every micro-batch's gradient is sent to the owners of its shards unreduced, in the replica dtype; each owner
  applies the weights and sums in FP32. That is half the bytes of FP32, it rounds nothing between ranks, and it allows
  the canonical order of reproducible runs.

Gradients are sent in the reduce dtype, rounded once if that is narrower; sums are FP32 always.

[Note: order of waits] Backends match collectives by their order, and a reduction may start a second collective when it
is waited for (an all-reduce on CPU is a reduce-scatter, then an all-gather). So all ranks wait for reductions in the
order in which they started them, which is the same on all ranks. A gradient's arrival never triggers a wait, because
ranks whose graphs differ receive their gradients in different orders; :class:`GradientReducer` waits only when it
starts a group, at the end of a micro-batch and at the end of the step. The all-gather of the ranks' micro-batch weights
(``weight=`` of ``backward``) starts before the first reduction of the micro-batch, whose wait includes it.
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
"""Waits for the weights of one micro-batch and returns them, by rank."""


class FlatGradient(Protocol):
    """The gradient of one flat buffer."""

    reduces_every_micro_batch: bool
    transient_bytes: int  # held while a reduction is in flight

    def receive(self, slot: int, grad: Tensor, weight: Weight) -> None:
        """Takes the gradient of parameter number ``slot`` of this micro-batch."""

    def complete(self) -> Sequence[Tensor]:
        """Zeroes the gradients that this micro-batch did not give; returns all gradients of this rank by slot."""

    def launch(self, weights: Weights) -> Pending:
        """Starts the reduction of the complete gradients."""

    def finish(self) -> Pending:
        """Completes the main grad after the last micro-batch."""


class UnshardedGradient:
    """REPLICATE: accumulates in ``full`` [numel] FP32, and all-reduces or reduce-scatters it once a step.

    Args:
        layout: layout of the flat buffer.
        comm: the ranks that reduce.
        full: the unsharded FP32 buffer, zero in its padding.
        all_reduce: all ranks need the whole sum, not only their shard of it.
        rounded: buffer for this rank's sum in the reduce dtype; None: it is reduced in FP32.
    """

    reduces_every_micro_batch = False

    def __init__(
        self, layout: FlatLayout, comm: Communicator, full: Tensor, all_reduce: bool, rounded: MicroBatchGradient | None
    ) -> None:
        self._layout = layout
        self._comm = comm
        self._full = full
        self._all_reduce = all_reduce
        self._rounded = rounded
        start, stop = layout.shard(comm.rank)
        self._shard = full[start:stop]
        self._sum = RunningSum(self._shard)
        self._one = Weight(torch.ones((), device=full.device), is_one=True)
        self._views = slot_views(full, layout)
        self.transient_bytes = full.nbytes if rounded is None else rounded.nbytes
        self._stale = set(range(len(self._views)))  # slots that still hold the last step's gradient

    def receive(self, slot: int, grad: Tensor, weight: Weight) -> None:
        view = self._views[slot]
        if slot in self._stale:
            self._stale.discard(slot)
            assign_scaled(view, grad, weight)
        else:
            add_scaled(view, grad, weight)

    def complete(self) -> Sequence[Tensor]:
        for slot in self._stale:
            self._views[slot].zero_()
        self._stale.clear()
        return self._views

    def launch(self, weights: Weights) -> Pending:
        self._stale = set(range(len(self._views)))
        if self._rounded is not None:
            rounded = self._rounded.open()
            rounded.copy_(self._full)  # rounds this rank's sum, once; the owner adds in FP32
            ones = [self._one] * self._comm.world_size  # the sums are weighted already
            return self._rounded.send(rounded, lambda shards: self._sum.push(shards, ones))
        if self._all_reduce:
            return self._comm.all_reduce_sum(self._full, label=self._layout.name)
        return self._comm.reduce_scatter_sum(self._shard, self._full, label=self._layout.name)

    def finish(self) -> Pending:
        """Starts the all-gather of the sums of rounded shards, if all ranks need the whole."""
        if self._rounded is None:
            return Pending()
        self._sum.finish(self._shard)
        if not self._all_reduce:
            return Pending()
        # in FP32: the reduce dtype would save a third of the bytes, but round the sum a second time
        return self._comm.all_gather(self._full, self._shard, label=f"sum {self._layout.name}")


class ShardedGradient:
    """SHARD: sends the shards of each micro-batch's gradient to their owners, which sum them.

    Args:
        layout: layout of the flat buffer.
        comm: the ranks that reduce.
        buffer: buffers of the unreduced gradient.
        gradient_sum: sums this rank's shard.
        shard: FP32 [shard_numel], this rank's shard of ``main_grad``.
        main_grad: ``shard``, or FP32 [numel] if every rank needs the whole sum (stage 0, reproducible).
    """

    reduces_every_micro_batch = True

    def __init__(
        self,
        layout: FlatLayout,
        comm: Communicator,
        buffer: MicroBatchGradient,
        gradient_sum: GradientSum,
        shard: Tensor,
        main_grad: Tensor,
    ) -> None:
        self._layout = layout
        self._comm = comm
        self._buffer = buffer
        self._sum = gradient_sum
        self._shard = shard
        self._main_grad = main_grad
        self.transient_bytes = buffer.nbytes
        self._gradient: Tensor | None = None
        self._views: list[Tensor] = []
        self._missing = set(range(len(layout.slots)))

    def _open(self) -> Tensor:
        if self._gradient is None:
            self._gradient = self._buffer.open()
            self._views = slot_views(self._gradient, self._layout)
        return self._gradient

    def receive(self, slot: int, grad: Tensor, weight: Weight) -> None:
        self._open()
        self._views[slot].copy_(grad)  # unweighted: the product would be rounded to the reduce dtype
        self._missing.discard(slot)

    def complete(self) -> Sequence[Tensor]:
        self._open()
        for slot in self._missing:  # the buffer holds another gradient from before
            self._views[slot].zero_()
        self._missing.clear()
        return self._views

    def launch(self, weights: Weights) -> Pending:
        """Sends each shard to its owner; the wait sums what all ranks sent of this rank's shard, in rank order."""
        gradient = self._open()
        self._missing = set(range(len(self._views)))
        self._gradient, self._views = None, []  # the next micro-batch takes another buffer while this one is read
        return self._buffer.send(gradient, lambda shards: self._sum.push(shards, weights()))

    def finish(self) -> Pending:
        """Writes the sum to the main grad, and starts its all-gather if the main grad is the whole buffer."""
        self._sum.finish(self._shard)
        if self._shard.numel() == self._main_grad.numel():
            return Pending()
        return self._comm.all_gather(self._main_grad, self._shard, label=f"sum {self._layout.name}")


class GradientReducer:
    """Starts each group's reduction during backward, in one order on all ranks; see [Note: order of waits].

    A group is launched when its own gradients and those of all groups before it are complete, so ranks whose graphs
    differ (unused parameters, data-dependent branches) still issue the same collectives.

    Args:
        groups: the flat gradients of each group, in the order in which backward is expected to complete them.
        num_parameters: number of gradients that complete each group.
        comm: the ranks that reduce.
        monitor: records whether the gradients are finite.
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
        self._reduces_every = any(flat.reduces_every_micro_batch for group in groups for flat in group)
        self._missing: list[set[int]] = []
        self._next = len(groups)
        self._reduce = False
        self._finished = True
        self._weights: Weights = list  # of the micro-batch; used only if every one is reduced
        self._in_flight: deque[tuple[Pending, int]] = deque()  # with the bytes that each holds
        self.micro_batch_weights: list[Tensor] = []  # [world_size] of each micro-batch of this step, if gathered

    def begin_micro_batch(self, weight: Weight, *, number: int, last: bool) -> None:
        """Begins micro-batch ``number`` with ``weight``; accumulated sums are reduced after the ``last``."""
        self._micro_batch = number
        self._incomplete = set(range(len(self._groups)))
        self._missing = [set(range(number)) for number in self._num_parameters]
        self._next = 0
        self._finished = False
        self._reduce = last or self._reduces_every
        if self._reduces_every:
            row = torch.empty(self._comm.world_size, dtype=torch.float32, device=self._comm.device)
            pending = self._comm.all_gather(row, weight.value.reshape(1), label="weights")
            # waited for inside the first reduction's wait: [Note: order of waits]
            self._weights = cache(partial(_waited, pending, row))
            self.micro_batch_weights.append(row)

    def is_duplicate(self, group: int, parameter: int) -> bool:
        """Whether this parameter has given a gradient in this micro-batch before."""
        return parameter not in self._missing[group]

    def complete(self, group: int, parameter: int) -> None:
        """Marks a parameter's gradient as received, and launches the groups that may start."""
        self._missing[group].discard(parameter)
        if not self._missing[group]:
            self._complete(group)
        # the next in the fixed order, not the one just completed: other ranks may complete others first
        while self._reduce and self._next < len(self._groups) and not self._missing[self._next]:
            self._launch_next()

    def end_micro_batch(self) -> None:
        """Launches the groups that backward left incomplete; missing gradients are zero."""
        for group in sorted(self._incomplete):
            self._complete(group)
        while self._reduce and self._next < len(self._groups):
            self._launch_next()

    def _complete(self, group: int) -> None:
        self._incomplete.discard(group)
        number = self._first_numbers[group]
        for flat in self._groups[group]:
            grads = flat.complete()
            # backward reaches the last parameter first
            self._monitor.record_finiteness(self._micro_batch, number, grads[::-1])
            number += len(grads)

    def _launch_next(self) -> None:
        for flat in self._groups[self._next]:
            # sizes and order are equal on all ranks, so all wait for the same ones here; two always overlap
            while len(self._in_flight) >= 2 and sum(size for _, size in self._in_flight) > MAX_BYTES_IN_FLIGHT:
                self._in_flight.popleft()[0].wait()
            self._in_flight.append((flat.launch(self._weights), flat.transient_bytes))
        self._next += 1

    def finish(self) -> None:
        """Completes the main grads of this step; a second call does nothing."""
        if self._finished:
            return
        self._finished = True
        if not self._reduce:  # the loop over the batch ended early, so no micro-batch was marked as the last
            self._reduce = True
            self.end_micro_batch()
        for pending, _ in self._in_flight:
            pending.proceed()  # starts the second collective of all of them before any is waited for
        while self._in_flight:
            self._in_flight.popleft()[0].wait()
        # all are started before the first wait, which sends their ready messages together
        for pending in [flat.finish() for group in self._groups for flat in group]:
            pending.wait()


def _waited(pending: Pending, row: Tensor) -> list[Weight]:
    pending.wait()
    return Weight.of_ranks(row)
