"""The gradient of one flat buffer, from backward to the main grad.

- :class:`AccumulatedGradient`, where every rank holds the main grad: micro-batches accumulate in an unsharded FP32
  buffer, whose sum is reduce-scattered after the last one.
- :class:`ExchangedGradient`, where it is sharded, and in reproducible runs: every micro-batch's gradient is sent to the
  owners of its shards unreduced, as backward left it; each owner applies the weights and sums in FP32. That is half the
  bytes of FP32, it rounds nothing between ranks, and it allows the canonical order of reproducible runs.

Gradients are sent in the reduce dtype, rounded once if that is narrower; sums are formed in FP32 always.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from dtrain.distributed.communicator import Communicator, GradientExchange, GradientHandle, Handle
from dtrain.parameters.micro_batch_weight import RankWeights, Weight
from dtrain.parameters.squares import chunk_norms
from dtrain.precision.fake import address
from dtrain.sharding.accumulate import GradientSum, add_scaled, assign_scaled
from dtrain.sharding.layout import CHUNK, ArenaSegment, FlatLayout
from dtrain.sharding.replica_sum import ReplicaSum
from dtrain.sharding.replicas import slot_views

_MAX_KNOWN = 32  # send buffers of one gradient whose parts are kept


class FlatGradient(ABC):
    """The gradient of one flat buffer on this rank.

    Args:
        segment: the range of the flat buffer whose main grad this rank holds.
        comm: the ranks that reduce.
        main_grad: [segment.numel], FP32, or BF16 (:mod:`dtrain.sharding.rounded_gradients`).

    Attributes:
        main_grad: the weighted sum over all micro-batches of all ranks, still scaled.
        shard: this rank's shard of it.
        storage: the tensor that this rank holds from one step to the next.
        replicas: sums the shard over the replicas of hybrid sharding; None: there is one replica.
    """

    replicas: ReplicaSum | None = None

    def __init__(self, segment: ArenaSegment, comm: Communicator, main_grad: Tensor) -> None:
        self._layout = segment.layout
        self._comm = comm
        self.main_grad = self.storage = main_grad
        self.shard = segment.shard_of(main_grad, comm.rank)

    @abstractmethod
    def parts(self, slot: int) -> Sequence[Tensor]:
        """Returns where parameter ``slot`` lies in the buffer that this micro-batch fills, in one part or several."""

    @abstractmethod
    def receive(self, slot: int, grad: Tensor, weight: Weight, *, is_first: bool) -> None:
        """Takes the gradient of parameter ``slot`` from one micro-batch, the step's first one or a later one."""

    def receive_zeros(self, slot: int, *, is_first: bool) -> None:
        """Takes zeros for parameter ``slot``, which has no gradient in the micro-batch."""
        for part in self.parts(slot):
            part.zero_()

    @abstractmethod
    def reduce(self) -> None:
        """Starts the reduction; all ranks call in one order."""

    @abstractmethod
    def finish_reduction(self, *, is_last: bool) -> Tensor | None:
        """Waits for the oldest reduction and adds it up; returns the weights [world_size] of its micro-batch, if any.

        All ranks call in the order of :meth:`reduce`. ``is_last``: it may be the last one of the step.
        """

    @property
    def chunks(self) -> Tensor:
        """[chunks of the shard, CHUNK], in the dtype of the main grad."""
        return self.shard.view(-1, CHUNK)

    @property
    def norms(self) -> Tensor:
        """FP32 [chunks of the shard], of a main grad on a CPU."""
        return chunk_norms(self.chunks)

    def complete(self) -> None:
        """Completes this rank's shard of the replica's main grad after the step's last reduction.

        With several replicas their sum starts, so all ranks call in one order.
        """
        if self.replicas is not None:
            self.replicas.start()

    def start_gather(self) -> Handle | None:
        """Starts the all-gather of what other ranks have summed, if this rank holds it; after :meth:`complete`."""
        if self.replicas is not None:
            return self.replicas.start_gather()
        if self.shard.numel() == self.main_grad.numel():
            return None
        return self._comm.all_gather(self.main_grad, self.shard, label=f"sum {self._layout.name}")


class AccumulatedGradient(FlatGradient):
    """The gradient that this rank accumulates in ``full``, which is reduce-scattered once a step.

    Args:
        segment, comm: as above.
        full: FP32 [layout.numel], zero in its padding; the main grad is this rank's range of it.
        dtype: in which the sum is sent.
    """

    def __init__(self, segment: ArenaSegment, comm: Communicator, full: Tensor, dtype: torch.dtype) -> None:
        super().__init__(segment, comm, segment.of(full))
        self.storage = full
        self._dtype = dtype
        self._views = slot_views(full, segment.layout)
        self._handle: Handle | None = None

    def parts(self, slot: int) -> Sequence[Tensor]:
        return self._views[slot : slot + 1]

    def receive(self, slot: int, grad: Tensor, weight: Weight, *, is_first: bool) -> None:
        # the first gradient of a step overwrites the last step's sum
        (assign_scaled if is_first else add_scaled)(self._views[slot], grad, weight)

    def receive_zeros(self, slot: int, *, is_first: bool) -> None:
        if is_first:
            super().receive_zeros(slot, is_first=is_first)

    def reduce(self) -> None:
        gathers = self.shard.numel() < self.main_grad.numel()
        self._handle = self._comm.reduce_scatter_sum(
            self.shard, self.storage, label=self._layout.name, dtype=self._dtype, gathers=gathers
        )

    def finish_reduction(self, *, is_last: bool) -> None:
        assert self._handle is not None
        self._handle.wait()


class ExchangedGradient(FlatGradient):
    """The gradient whose shards are sent to their owners in each micro-batch, which sum them.

    Args:
        segment, comm, main_grad: as above.
        exchange: its send buffers.
        index: number of the flat buffer among the sends of the exchange.
        gradient_sum: sums this rank's shard of ``main_grad``.
    """

    def __init__(
        self,
        segment: ArenaSegment,
        comm: Communicator,
        main_grad: Tensor,
        exchange: GradientExchange,
        index: int,
        gradient_sum: GradientSum,
    ) -> None:
        super().__init__(segment, comm, main_grad)
        self._exchange = exchange
        self._index = index
        self._sum = gradient_sum
        self._parts: list[list[Tensor]] = []  # by slot, of the buffer that this micro-batch fills
        self._known: dict[int, list[list[Tensor]]] = {}  # the same of each buffer that was filled, by its address
        self._in_flight: deque[GradientHandle] = deque()

    def parts(self, slot: int) -> Sequence[Tensor]:
        if not self._parts:
            self._parts = self._parts_of(self._exchange.open(self._index))
        return self._parts[slot]

    def _parts_of(self, buffer: Tensor) -> list[list[Tensor]]:
        # an exchange hands out a few buffers in turn, and the views of one take longer than small gradients; while they
        # are kept, its memory cannot be another tensor's
        key = address(buffer)
        parts = self._known.get(key)
        if parts is None:
            parts = slot_parts(buffer, self._layout, self._exchange.gap(self._index))
            if len(self._known) < _MAX_KNOWN:
                self._known[key] = parts
        return parts

    def receive(self, slot: int, grad: Tensor, weight: Weight, *, is_first: bool) -> None:
        parts = self.parts(slot)
        cut = [grad] if len(parts) == 1 else grad.reshape(-1).split([part.numel() for part in parts])
        # unweighted: the product would be rounded to the reduce dtype; in one call, because a part for each rank may be
        torch._foreach_copy_(list(parts), cut)

    def reduce(self) -> None:
        self._parts = []  # the next micro-batch takes another buffer while this one is read
        self._in_flight.append(self._exchange.send(self._index))

    def finish_reduction(self, *, is_last: bool) -> Tensor:
        handle = self._in_flight.popleft()
        shards, weights = handle.wait()
        # norms are taken of the last sum: with replicas, that over all of them
        self._sum.push(shards, RankWeights(weights), is_last=is_last and self.replicas is None)
        handle.release()
        return weights

    @property
    def norms(self) -> Tensor:
        return super().norms if self._sum.norms is None else self._sum.norms

    def complete(self) -> None:
        self._sum.finish()
        super().complete()


def slot_parts(buffer: Tensor, layout: FlatLayout, gap: int) -> list[list[Tensor]]:
    """Returns each parameter in a ``buffer`` with ``gap`` elements after each shard: a view, or its flat parts."""
    size = (layout.shard_numel if gap else layout.numel) or 1  # 0 if no parameter has elements
    found = []
    for slot in layout.slots:
        bounds = [slot.start, *range(slot.start // size * size + size, slot.stop, size), slot.stop]
        # all elements of a shard are moved by the gaps before it
        moved = [(start + start // size * gap, stop + start // size * gap) for start, stop in pairwise(bounds)]
        parts = [buffer[start:stop] for start, stop in moved]
        found.append(parts if len(parts) > 1 else [parts[0].view(slot.spec.shape)])
    return found
