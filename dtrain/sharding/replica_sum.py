"""The sum of a main grad's shard over the replicas of hybrid sharding: once a step, in FP32.

It is an all-reduce in two halves: each replica sums its part of the shard, then all gather the parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dtrain.distributed.communicator import Communicator, Handle
from dtrain.distributed.transport.gradient_buffers import MAX_BYTES_IN_FLIGHT
from dtrain.parameters.micro_batch_weight import Weight
from dtrain.sharding.accumulate import GradientSum, TreeSum


class ReplicaSum(Protocol):
    """Replaces a shard, FP32 [n], of the replica's own sum by the sum of all replicas."""

    def start(self) -> None:
        """Starts the sum, once the shard is complete; all ranks call in one order."""

    def start_gather(self) -> Handle:
        """Waits for the sum of this replica's part, and starts the all-gather of the parts."""


def across(name: str) -> str:
    """Returns the label of the collectives that sum flat buffer ``name`` over the replicas."""
    return f"{name} across replicas"


def _part(shard: Tensor, comm: Communicator) -> Tensor:
    """Returns the elements of ``shard`` that this rank sums for all replicas."""
    # a row of a view would begin behind the end of an empty shard
    return shard.chunk(comm.world_size)[comm.rank] if shard.numel() else shard


class RunningReplicaSum(ReplicaSum):
    """Sums in the order of the replicas on CPUs, in NCCL's order on GPUs; all replicas get the same bits.

    Args:
        comm: the ranks that hold the same shard.
        shard: FP32 [n], a multiple of the number of replicas.
        label: name in messages.
    """

    def __init__(self, comm: Communicator, shard: Tensor, label: str) -> None:
        self._comm = comm
        self._shard = shard
        self._part = _part(shard, comm)
        self._label = label
        self._handle: Handle | None = None

    def start(self) -> None:
        self._handle = self._comm.reduce_scatter_sum(self._part, self._shard, label=self._label, gathers=True)

    def start_gather(self) -> Handle:
        assert self._handle is not None
        handle, self._handle = self._handle, None
        handle.wait()
        return self._comm.all_gather(self._shard, self._part, label=self._label)


class SubtreesInFlight:
    """The sums of subtrees that the flat buffers of a model have sent, in their order."""

    def __init__(self) -> None:
        self._in_flight: deque[tuple[TreeReplicaSum, Handle, Tensor]] = deque()
        self._nbytes = 0

    def add(self, target: TreeReplicaSum, handle: Handle, received: Tensor) -> None:
        """Keeps one; if they exceed the limit, waits for the oldest ones."""
        self._in_flight.append((target, handle, received))
        self._nbytes += received.nbytes
        # by the sizes alone, which are equal on all ranks, so that all wait for the same ones
        while len(self._in_flight) > 1 and self._nbytes > MAX_BYTES_IN_FLIGHT:
            self.receive_oldest()

    def receive_oldest(self) -> None:
        """Waits for the oldest one and adds it to its sum."""
        target, handle, received = self._in_flight.popleft()
        self._nbytes -= received.nbytes
        handle.wait()
        target.receive_subtrees(received)


class TreeReplicaSum(GradientSum, ReplicaSum):
    """Sums along the tree of ``dtrain.sharding.accumulate.TreeSum``, so that hybrid sharding changes no bit.

    The micro-batches that a replica's ranks compute at the same time have consecutive numbers. If the ranks are a power
    of two, their gradients make up one subtree, whose sum the owner of the shard forms. After each micro-batch the sums
    of the subtrees go to the owner of each part, whose tree is the upper part of that of all ranks.

    Args:
        comm, shard, label: as of ``RunningReplicaSum``.
        in_flight: of all flat buffers of the model.
    """

    def __init__(self, comm: Communicator, shard: Tensor, label: str, in_flight: SubtreesInFlight) -> None:
        super().__init__(shard)
        self._comm = comm
        self._part = _part(shard, comm)
        self._label = label
        self._sum = TreeSum(self._part)
        self._all_in_flight = in_flight
        self._num_in_flight = 0
        # products with 1 change no bit
        self._weights = [Weight(torch.ones((), device=shard.device), is_one=True)] * comm.world_size

    def push(self, grads: Sequence[Tensor], weights: Sequence[Weight], *, is_last: bool = False) -> None:
        """Adds the gradients of the replica's ranks from one micro-batch."""
        subtree, received = torch.empty_like(self._main_grad), torch.empty_like(self._main_grad)
        own = TreeSum(subtree)
        own.push(grads, weights)
        own.finish()
        sizes = [self._part.numel()] * self._comm.world_size
        total = subtree.numel() * self._comm.world_size
        handle = self._comm.all_to_all(received, subtree, sizes, sizes, total=total, label=self._label)
        self._num_in_flight += 1
        self._all_in_flight.add(self, handle, received)

    def receive_subtrees(self, received: Tensor) -> None:
        """Adds the sums of one micro-batch's subtrees, [replicas * n]."""
        self._num_in_flight -= 1
        self._sum.push(received.view(self._comm.world_size, -1).unbind(), self._weights)

    def finish(self) -> None:
        """Completes the sum of this replica's part, zero if nothing was added, and starts the next step."""
        while self._num_in_flight:
            self._all_in_flight.receive_oldest()
        self._sum.finish()

    def start(self) -> None:
        """Starts nothing: the parts are summed."""

    def start_gather(self) -> Handle:
        return self._comm.all_gather(self._main_grad, self._part, label=self._label)
