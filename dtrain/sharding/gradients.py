"""The gradient of one flat buffer, from backward to the main grad: how it is sent, summed, and joined over replicas.

``dtrain.sharding.placement.GRADIENTS`` has the combinations. A gradient is sent in one of two ways:

- ``LocalSending``, if every rank holds the main grad: micro-batches accumulate in an unsharded buffer, whose sum
  is reduce-scattered during the backward of the last one.
- ``ExchangedSending``, in reproducible runs, or if the main grad is sharded, on the host or BF16 on several ranks:
  each micro-batch's gradient is sent to the owners of its shards unreduced; each owner applies the weights and sums in
  FP32. This allows the canonical order of reproducible runs.

Gradients are sent in the reduce dtype. With ``reduce_dtype=auto`` an exchange sends what backward gives, which is BF16
in a BF16 unit: half the bytes of FP32, and nothing is rounded between ranks. Sums are formed in FP32 always.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from dtrain.distributed.communicator import Communicator, GradientExchange, Handle
from dtrain.distributed.transport.single_rank import Completed
from dtrain.parameters.micro_batch_weight import Weight
from dtrain.parameters.squares import chunk_norms
from dtrain.precision.fake import address
from dtrain.sharding.accumulate import GradientSum, add_scaled
from dtrain.sharding.layout import CHUNK, ArenaSegment, FlatLayout
from dtrain.sharding.replica_sum import ReplicaSum
from dtrain.sharding.replicas import slot_views

_MAX_KNOWN = 64  # send buffers of one gradient whose parts are kept


class Sending(Protocol):
    """Takes the gradients of one flat buffer from backward, and sends them to the owners of their shards."""

    def receive(self, slots: Sequence[int], grads: Sequence[Tensor], weight: Weight, *, is_first: bool) -> None:
        """Takes the gradients of parameters ``slots`` from one micro-batch, the step's first one or a later one."""

    @property
    def buffer(self) -> Tensor:
        """The whole 1-D buffer of ``parts``; its padding is zero, but the gaps of an exchange may hold anything."""

    def parts(self, slot: int) -> Sequence[Tensor]:
        """Returns where parameter ``slot`` lies in the buffer that this micro-batch fills, in one part or several."""

    def receive_zeros(self, slot: int, *, is_first: bool) -> None:
        """Takes zeros for parameter ``slot``, which has no gradient in the micro-batch."""

    def start(self) -> Any:
        """Starts to send; returns a ``GradientHandle`` if the shards arrive unsummed, else a ``Handle``."""


class FlatGradient:
    """The gradient of one flat buffer on this rank.

    Args:
        segment: the range of the flat buffer whose main grad this rank holds.
        comm: the ranks that reduce.
        storage: the main grad [segment.numel], or the rank's own sum [layout.numel], of which it is a range.
        sending: takes the gradients from backward, and sends them.
        total: sums this rank's shard of what is sent; None: what is sent is summed on its way.
        replicas: sums the shard over the replicas of hybrid sharding; None: there is one replica.

    Attributes:
        main_grad: the weighted sum over all micro-batches of all ranks, still scaled: FP32, or BF16
            (``dtrain.sharding.rounded_gradients``).
        shard: this rank's shard of it.
        chunks: [chunks of the shard, CHUNK], the same.
        storage: the tensor that this rank holds from one step to the next.
        sending, total, replicas: see above.
    """

    def __init__(
        self,
        segment: ArenaSegment,
        comm: Communicator,
        storage: Tensor,
        sending: Sending,
        total: GradientSum | None = None,
        replicas: ReplicaSum | None = None,
    ) -> None:
        self._name = segment.layout.name
        self._comm = comm
        self.storage = storage
        self.main_grad = segment.of(storage) if storage.numel() == segment.layout.numel else storage
        self.shard = segment.shard_of(self.main_grad, comm.rank)
        self.chunks = self.shard.view(-1, CHUNK)
        self.sending, self.total, self.replicas = sending, total, replicas
        self._in_flight: deque[Any] = deque()

    def reduce(self) -> None:
        """Starts the reduction; all ranks call in one order."""
        self._in_flight.append(self.sending.start())

    def finish_reduction(self, *, is_last: bool) -> Tensor | None:
        """Waits for the oldest reduction and adds it up; returns the weights [world_size] of its micro-batch, if any.

        All ranks call in the order of ``reduce``. ``is_last``: it may be the last one of the step.
        """
        handle = self._in_flight.popleft()
        if self.total is None:
            handle.wait()
            return None
        # norms are taken of the last sum: with replicas, that over all of them
        return self.total.receive(handle, is_last=is_last and self.replicas is None)

    @property
    def norms(self) -> Tensor:
        """FP32 [chunks of the shard]; only for a main grad on a CPU."""
        taken = None if self.total is None else self.total.norms
        return chunk_norms(self.chunks) if taken is None else taken

    def complete(self) -> None:
        """Completes this rank's shard of the replica's main grad after the step's last reduction.

        With several replicas their sum starts, so all ranks call in one order.
        """
        if self.total is not None:
            self.total.finish()
        if self.replicas is not None:
            self.replicas.start()

    def start_gather(self) -> Handle | None:
        """Starts the all-gather of what other ranks have summed, if this rank holds it; after ``complete``."""
        if self.replicas is not None:
            return self.replicas.start_gather()
        if self.shard.numel() == self.main_grad.numel():
            return None
        return self._comm.all_gather(self.main_grad, self.shard, label=f"sum {self._name}")


class LocalSending(Sending):
    """Accumulates the gradients on this rank in ``full``, which is reduce-scattered once a step.

    Args:
        segment: the range of the flat buffer whose main grad this rank holds.
        comm: the ranks that reduce.
        full: [layout.numel], zero in its padding: FP32, or BF16 of a single rank.
        dtype: in which the sum is sent.
        sums: method ``RoundedSum.accumulate`` of each slot; None: gradients are added to ``full`` in FP32.
    """

    def __init__(
        self,
        segment: ArenaSegment,
        comm: Communicator,
        full: Tensor,
        dtype: torch.dtype,
        sums: Sequence[Callable[..., None]] | None = None,
    ) -> None:
        layout = segment.layout
        self._comm = comm
        self._full = full
        self._shard = full[slice(*layout.shard(comm.rank))]
        self._label, self._dtype = layout.name, dtype
        self._gathers = layout.shard_numel < segment.numel
        self._views = slot_views(full, layout)
        self._sums = sums
        self._zero, self._one = full.new_zeros(()), Weight(torch.ones((), device=full.device), is_one=True)

    def receive(self, slots: Sequence[int], grads: Sequence[Tensor], weight: Weight, *, is_first: bool) -> None:
        if self._sums is None:
            add_scaled([self._views[slot] for slot in slots], list(grads), weight, is_first=is_first)
            return
        for slot, grad in zip(slots, grads, strict=True):
            self._sums[slot](grad, weight, is_first=is_first)

    @property
    def buffer(self) -> Tensor:
        return self._full

    def parts(self, slot: int) -> Sequence[Tensor]:
        return self._views[slot : slot + 1]

    def receive_zeros(self, slot: int, *, is_first: bool) -> None:
        if is_first:  # later ones change no sum; this one is the first addition, by which a rounding is seeded
            self.receive([slot], [self._zero], self._one, is_first=True)

    def start(self) -> Handle:
        if self._full.dtype == torch.bfloat16:  # of a single rank, which has the whole sum
            return Completed()
        return self._comm.reduce_scatter_sum(
            self._shard, self._full, label=self._label, dtype=self._dtype, gathers=self._gathers
        )


class ExchangedSending(Sending):
    """Sends the shards of each micro-batch's gradient to their owners.

    Args:
        layout: layout of the flat buffer.
        exchange: its send buffers.
        index: number of the flat buffer among the sends of the exchange.
    """

    def __init__(self, layout: FlatLayout, exchange: GradientExchange, index: int) -> None:
        self._layout = layout
        self._exchange = exchange
        self._index = index
        # the buffer that this micro-batch fills, and its parts by slot, once there is a gradient
        self._opened: tuple[Tensor, list[list[Tensor]]] | None = None
        self._known: dict[int, list[list[Tensor]]] = {}  # the same of each buffer that was filled, by its address

    def receive(self, slots: Sequence[int], grads: Sequence[Tensor], weight: Weight, *, is_first: bool) -> None:
        targets: list[Tensor] = []
        cut: list[Tensor] = []
        of_slot = self._open()[1]
        for slot, grad in zip(slots, grads, strict=True):
            parts = of_slot[slot]
            targets += parts
            cut += [grad] if len(parts) == 1 else grad.reshape(-1).split([part.numel() for part in parts])
        # unweighted: the product would be rounded to the reduce dtype
        torch._foreach_copy_(targets, cut)

    @property
    def buffer(self) -> Tensor:
        return self._open()[0]

    def parts(self, slot: int) -> Sequence[Tensor]:
        return self._open()[1][slot]

    def _open(self) -> tuple[Tensor, list[list[Tensor]]]:
        if self._opened is None:
            buffer = self._exchange.open(self._index)
            self._opened = buffer, self._parts_of(buffer)
        return self._opened

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

    def receive_zeros(self, slot: int, *, is_first: bool) -> None:
        for part in self.parts(slot):
            part.zero_()

    def start(self) -> Any:
        self._opened = None  # the next micro-batch takes another buffer while this one is read
        return self._exchange.send(self._index)


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
