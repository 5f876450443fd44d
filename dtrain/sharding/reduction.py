"""Gradients on their way from backward to the main grads.

Two ways, chosen by where the gradient is placed:

- REPLICATE: micro-batches accumulate in an unsharded FP32 buffer; the sum is reduced on the last one.
- SHARD: the leaves of every micro-batch go to their owners as they are, in the replica dtype; the owner weighs and
  sums them in FP32. Half the bytes of FP32 on the wire, no rounding between ranks, and the canonical order for
  reproducible runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from dtrain.distributed.collectives import Communicator, Pending
from dtrain.sharding.accumulate import LeafSum, assign_scaled, scaled_fp32
from dtrain.sharding.buffer import BufferPool, slot_views
from dtrain.sharding.layout import FlatLayout

# Backward waits for the oldest reduction when two are under way and their buffers hold more than this: small groups
# gain from more overlap, large ones must not pile up.
_MAX_BYTES_IN_FLIGHT = 64 * 2**20


class FlatGradient(Protocol):
    """The gradient of one flat buffer."""

    reduces_every_micro_batch: bool
    transient_bytes: int  # held while a reduction is under way

    def receive(self, slot: int, grad: Tensor, weight: Tensor) -> None:
        """Takes the gradient of parameter number ``slot`` of this micro-batch."""

    def launch(self, weights: Callable[[], Tensor]) -> Pending:
        """Starts the reduction; parameters that sent nothing count as zero. ``weights()`` [world_size], waits."""

    def finish(self) -> Pending:
        """Completes the main grad after the last micro-batch."""


class UnshardedGradient:
    """REPLICATE: accumulates ``full`` [numel] FP32, all-reduces or reduce-scatters it once a step.

    Args:
        layout: of the flat buffer.
        comm: who takes part.
        full: the unsharded FP32 buffer, zero in its padding.
        shard: this rank's slice of ``full``, or None to all-reduce the whole.
    """

    reduces_every_micro_batch = False

    def __init__(self, layout: FlatLayout, comm: Communicator, full: Tensor, shard: Tensor | None) -> None:
        self._layout = layout
        self._comm = comm
        self._full = full
        self._shard = shard
        self._views = slot_views(full, layout)
        self.transient_bytes = full.nbytes
        self._fresh = set(range(len(self._views)))  # slots that still hold the last step's gradient

    def receive(self, slot: int, grad: Tensor, weight: Tensor) -> None:
        """Adds the weighted gradient in FP32."""
        view = self._views[slot]
        if slot in self._fresh:
            self._fresh.discard(slot)
            assign_scaled(view, grad, weight)
        else:
            view.add_(scaled_fp32(grad, weight))

    def launch(self, weights: Callable[[], Tensor]) -> Pending:
        """Starts the one reduction of this step."""
        for slot in self._fresh:
            self._views[slot].zero_()
        self._fresh = set(range(len(self._views)))
        if self._shard is None:
            return self._comm.all_reduce_sum(self._full, label=self._layout.name)
        return self._comm.reduce_scatter_sum(self._shard, self._full, label=self._layout.name)

    def finish(self) -> Pending:
        """Nothing is left to do."""
        return Pending()


class ShardedGradient:
    """SHARD: sends each micro-batch's leaves to their owners, who sum them.

    Args:
        layout: of the flat buffer.
        comm: who takes part.
        pool: where leaf buffers come from.
        leaf_sum: sums this rank's shard of the leaves.
        wire_dtype: of the leaves as they travel.
        main_grad: FP32 [shard_numel], or [numel] where every rank wants the whole sum (stage 0, reproducible).
    """

    reduces_every_micro_batch = True

    def __init__(
        self,
        layout: FlatLayout,
        comm: Communicator,
        pool: BufferPool,
        leaf_sum: LeafSum,
        wire_dtype: torch.dtype,
        main_grad: Tensor,
    ) -> None:
        self._layout = layout
        self._comm = comm
        self._pool = pool
        self._wire_dtype = wire_dtype
        self._sum = leaf_sum
        self._main_grad = main_grad
        start, stop = layout.shard(comm.rank)
        self._shard = main_grad if main_grad.numel() == layout.shard_numel else main_grad[start:stop]
        self.transient_bytes = 2 * layout.numel * wire_dtype.itemsize  # sent and received
        self._leaf: Tensor | None = None
        self._views: list[Tensor] = []
        self._missing = set(range(len(layout.slots)))

    def _open(self) -> Tensor:
        if self._leaf is None:
            self._leaf = self._pool.take(self._layout.extents, self._layout.numel, self._wire_dtype)
            self._views = slot_views(self._leaf, self._layout)
        return self._leaf

    def receive(self, slot: int, grad: Tensor, weight: Tensor) -> None:
        """Puts the leaf, unweighted, in its place of the flat buffer."""
        self._open()
        self._views[slot].copy_(grad)
        self._missing.discard(slot)

    def launch(self, weights: Callable[[], Tensor]) -> Pending:
        """Sends the leaves; when waited for, sums what came from all ranks, in rank order."""
        leaf = self._open()
        for slot in self._missing:
            self._views[slot].zero_()
        self._missing = set(range(len(self._views)))
        self._leaf, self._views = None, []
        layout, world_size = self._layout, self._comm.world_size
        received = leaf if world_size == 1 else self._pool.take("received", layout.numel, self._wire_dtype)

        def accumulate() -> None:
            for row, weight in zip(received.view(world_size, -1), weights().unbind(), strict=True):
                self._sum.push(row, weight)
            self._pool.give(layout.extents, leaf)
            if received is not leaf:
                self._pool.give("received", received)

        return self._comm.exchange_slices(received, leaf, label=layout.name).then(accumulate)

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
    """

    def __init__(self, groups: list[list[FlatGradient]], num_parameters: list[int], comm: Communicator) -> None:
        self._groups = groups
        self._num_parameters = num_parameters
        self._comm = comm
        self._every = any(flat.reduces_every_micro_batch for group in groups for flat in group)
        self._missing: list[set[int]] = []
        self._next = len(groups)
        self._reduce = False
        self._finished = True
        self._weights: Callable[[], Tensor] = partial(torch.ones, comm.world_size, dtype=torch.float32)
        self._in_flight: deque[tuple[Pending, int]] = deque()  # with the bytes that each holds
        self.micro_batch_weights: list[Tensor] = []  # [world_size] of each micro-batch of this step, if exchanged

    def begin_micro_batch(self, weight: Tensor, *, last: bool) -> None:
        """Opens a micro-batch of ``weight`` (0-dim FP32); ``last``: the sums are reduced after it."""
        self._missing = [set(range(number)) for number in self._num_parameters]
        self._next = 0
        self._finished = False
        self._reduce = last or self._every
        if self._every:
            row = torch.empty(self._comm.world_size, dtype=torch.float32, device=self._comm.device)
            pending = self._comm.all_gather(row, weight.reshape(1), label="weights")
            self._weights = partial(_waited, pending, row)
            self.micro_batch_weights.append(row)

    def is_duplicate(self, group: int, parameter: int) -> bool:
        """Whether this parameter has sent its gradient of this micro-batch already."""
        return parameter not in self._missing[group]

    def complete(self, group: int, parameter: int) -> None:
        """Notes that a parameter's gradient was received, and launches what may start."""
        self._missing[group].discard(parameter)
        while self._reduce and self._next < len(self._groups) and not self._missing[self._next]:
            self._launch_next()

    def end_micro_batch(self) -> None:
        """Launches the groups that backward left incomplete: what is missing counts as zero."""
        while self._reduce and self._next < len(self._groups):
            self._launch_next()

    def _launch_next(self) -> None:
        for flat in self._groups[self._next]:
            while self._in_flight and (self._in_flight[0][0].is_done() or self._has_enough_in_flight()):
                self._in_flight.popleft()[0].wait()
            self._in_flight.append((flat.launch(self._weights), flat.transient_bytes))
        self._next += 1

    def _has_enough_in_flight(self) -> bool:
        held = sum(size for _, size in self._in_flight)
        return len(self._in_flight) >= 2 and held > _MAX_BYTES_IN_FLIGHT

    def drain(self) -> None:
        """Waits for all reductions that were launched."""
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


def _waited(pending: Pending, tensor: Tensor) -> Tensor:
    pending.wait()
    return tensor
