"""The gradient of one flat buffer, from backward to the main grad.

There are two kinds, chosen by the gradient's placement:

- :class:`AccumulatedGradient` (REPLICATE): micro-batches accumulate in an unsharded FP32 buffer, whose sum is
  reduce-scattered after the last one.
- :class:`ExchangedGradient` (SHARD): every micro-batch's gradient is sent to the owners of its shards unreduced, in the
  replica dtype; each owner applies the weights and sums in FP32. That is half the bytes of FP32, it rounds nothing
  between ranks, and it allows the canonical order of reproducible runs.

Gradients are sent in the reduce dtype, rounded once if that is narrower; sums are FP32 always.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from dtrain.distributed.communicator import Communicator, GradientExchange, GradientHandle, Handle
from dtrain.parameters.micro_batch_weight import Weight
from dtrain.sharding.accumulate import GradientSum, add_scaled, assign_scaled
from dtrain.sharding.layout import ArenaSegment
from dtrain.sharding.replicas import slot_views


class FlatGradient(ABC):
    """The gradient of one flat buffer on this rank.

    Args:
        segment: the range of the flat buffer whose main grad this rank holds.
        comm: the ranks that reduce.
        main_grad: FP32 [segment.numel].

    Attributes:
        main_grad: the weighted sum over all micro-batches of all ranks, still scaled.
        shard: this rank's shard of it.
    """

    def __init__(self, segment: ArenaSegment, comm: Communicator, main_grad: Tensor) -> None:
        self._layout = segment.layout
        self._comm = comm
        self.main_grad = main_grad
        self.shard = segment.shard_of(main_grad, comm.rank)

    @property
    def storage(self) -> Tensor:
        """The tensor that this rank holds from one step to the next."""
        return self.main_grad

    @abstractmethod
    def receive(self, slot: int, grad: Tensor, weight: Weight, *, is_first: bool) -> None:
        """Takes the gradient of parameter ``slot`` from one micro-batch, the step's first one or a later one."""

    @abstractmethod
    def complete(self, missing: Iterable[int], *, is_first: bool) -> list[Tensor]:
        """Takes zeros for the parameters ``missing``; returns the gradients of all, views of the buffer."""

    @abstractmethod
    def finish_first(self, number: int) -> int:
        """Returns the number of the reduction that must be finished before this one, ``number``; negative: none."""

    @abstractmethod
    def reduce(self) -> None:
        """Starts the reduction; all ranks call in one order."""

    @abstractmethod
    def finish_reduction(self) -> Tensor | None:
        """Waits for the oldest reduction and adds it up; returns the weights [world_size] of its micro-batch, if any.

        All ranks call in the order of :meth:`reduce`.
        """

    def start_gather(self) -> Handle | None:
        """Completes this rank's shard of the main grad; starts the all-gather of the shards if the rank holds all."""
        if self.shard.numel() == self.main_grad.numel():
            return None
        return self._comm.all_gather(self.main_grad, self.shard, label=f"sum {self._layout.name}")


class AccumulatedGradient(FlatGradient):
    """REPLICATE: accumulates in ``full``, and reduce-scatters it once a step.

    Args:
        segment, comm: as above.
        full: FP32 [layout.numel], zero in its padding; the main grad is this rank's range of it.
        dtype: in which the sum is sent.
        num_kept: number of reductions that may be in flight when this one starts.
    """

    def __init__(
        self, segment: ArenaSegment, comm: Communicator, full: Tensor, dtype: torch.dtype, num_kept: int
    ) -> None:
        super().__init__(segment, comm, segment.of(full))
        self._full = full
        self._dtype = dtype
        self._num_kept = num_kept
        self._views = slot_views(full, segment.layout)
        self._handle: Handle | None = None

    @property
    def storage(self) -> Tensor:
        return self._full

    def receive(self, slot: int, grad: Tensor, weight: Weight, *, is_first: bool) -> None:
        # the first gradient of a step overwrites the last step's sum
        (assign_scaled if is_first else add_scaled)(self._views[slot], grad, weight)

    def complete(self, missing: Iterable[int], *, is_first: bool) -> list[Tensor]:
        if is_first:
            for slot in missing:
                self._views[slot].zero_()
        return self._views

    def finish_first(self, number: int) -> int:
        return number - 1 - self._num_kept

    def reduce(self) -> None:
        gathers = self.shard.numel() < self.main_grad.numel()
        self._handle = self._comm.reduce_scatter_sum(
            self.shard, self._full, label=self._layout.name, dtype=self._dtype, gathers=gathers
        )

    def finish_reduction(self) -> None:
        assert self._handle is not None
        self._handle.wait()


class ExchangedGradient(FlatGradient):
    """SHARD: sends the shards of each micro-batch's gradient to their owners, which sum them.

    Args:
        segment, comm, main_grad: as above.
        exchange: send buffers.
        index: number of the flat buffer in the exchange.
        gradient_sum: makes the sum of a shard.
    """

    def __init__(
        self,
        segment: ArenaSegment,
        comm: Communicator,
        main_grad: Tensor,
        exchange: GradientExchange,
        index: int,
        gradient_sum: type[GradientSum],
    ) -> None:
        super().__init__(segment, comm, main_grad)
        self._exchange = exchange
        self._index = index
        self._sum = gradient_sum(self.shard)
        self._views: list[Tensor] = []  # of the buffer that this micro-batch fills
        self._in_flight: deque[GradientHandle] = deque()

    def _opened(self) -> list[Tensor]:
        if not self._views:
            self._views = slot_views(self._exchange.open(self._index), self._layout)
        return self._views

    def receive(self, slot: int, grad: Tensor, weight: Weight, *, is_first: bool) -> None:
        self._opened()[slot].copy_(grad)  # unweighted: the product would be rounded to the reduce dtype

    def complete(self, missing: Iterable[int], *, is_first: bool) -> list[Tensor]:
        views = self._opened()
        for slot in missing:  # the buffer holds another gradient from before
            views[slot].zero_()
        return views

    def finish_first(self, number: int) -> int:
        return self._exchange.finish_first()

    def reduce(self) -> None:
        self._views = []  # the next micro-batch takes another buffer while this one is read
        self._in_flight.append(self._exchange.send(self._index))

    def finish_reduction(self) -> Tensor:
        handle = self._in_flight.popleft()
        shards, weights = handle.wait()
        self._sum.push(shards, Weight.of_ranks(weights))
        handle.release()
        return weights

    def start_gather(self) -> Handle | None:
        self._sum.finish()
        return super().start_gather()


class ReductionQueue:
    """The reductions in flight, in their order: [Note: order of waits] in ``sharding.reduce``.

    Args:
        num_buffers: number of reductions of one micro-batch.
        exchange: sends the gradients of each micro-batch; None: only a rank's sum over its micro-batches is reduced.

    Attributes:
        exchange: see above.
        weights: [world_size] of each micro-batch of this step that was exchanged.
    """

    def __init__(self, num_buffers: int, exchange: GradientExchange | None) -> None:
        self._num_buffers = num_buffers
        self.exchange = exchange
        self._num_started = 0
        self._in_flight: deque[tuple[int, FlatGradient]] = deque()  # with their numbers
        self.weights: list[Tensor] = []

    def begin_micro_batch(self, weight: Weight, *, is_first: bool) -> None:
        """Begins a micro-batch, the step's first or a later one."""
        if is_first:
            self.weights = []
        if self.exchange is not None:
            self.exchange.begin(weight.value)

    def start(self, gradient: FlatGradient) -> None:
        """Starts the reduction of ``gradient``; finishes the oldest ones first if too many are in flight."""
        # by numbers that are equal on all ranks, so all wait for the same ones here
        oldest = gradient.finish_first(self._num_started)
        while self._in_flight and self._in_flight[0][0] <= oldest:
            self._finish_oldest()
        gradient.reduce()
        self._in_flight.append((self._num_started, gradient))
        self._num_started += 1

    def finish(self) -> None:
        """Finishes all reductions."""
        while self._in_flight:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        number, gradient = self._in_flight.popleft()
        weights = gradient.finish_reduction()
        if weights is not None and number % self._num_buffers == 0:  # the same for all buffers of a micro-batch
            self.weights.append(weights)
