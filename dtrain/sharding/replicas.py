"""Tensors over a layout: the replicas that the model computes with, and reusable leaf buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dtrain.distributed.communicator import Communicator, Pending
from dtrain.errors import ContractError
from dtrain.sharding.layout import ArenaSegment, FlatLayout


def slot_views(flat: Tensor, layout: FlatLayout) -> list[Tensor]:
    """One view a parameter, in the parameter's shape."""
    return [flat[slot.start : slot.stop].view(slot.spec.shape) for slot in layout.slots]


class ParameterViews:
    """How a model sees a replica: its parameters are views of the flat buffer.

    The Parameter objects stay the same, so ties, user references and hooks survive. While there is no buffer, every
    parameter is NaN in its own shape, at the cost of one element.

    Args:
        layout: of the flat buffer.
        parameters: by name.
        dtype: of the parameters; None: that of the layout.
    """

    num_copies = 1
    """Flat buffers that hold the replica."""

    def __init__(
        self, layout: FlatLayout, parameters: Mapping[str, nn.Parameter], dtype: torch.dtype | None = None
    ) -> None:
        self._layout = layout
        self._parameters = [parameters[slot.spec.name] for slot in layout.slots]
        device = self._parameters[0].device
        nan = torch.full((), torch.nan, dtype=dtype or layout.dtype, device=device)
        self._placeholders = [nan.expand(slot.spec.shape) for slot in layout.slots]
        for parameter in self._parameters:
            parameter.grad = None
        self.unbind()

    def bind(self, copies: Sequence[Tensor]) -> None:
        """The values are in ``copies``, each [numel], from now on."""
        self._set(slot_views(copies[0], self._layout))

    def unbind(self) -> None:
        """There are no values from now on."""
        self._set(self._placeholders)

    def _set(self, values: Sequence[Tensor]) -> None:
        self._addresses = [value.data_ptr() for value in values]
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.data = value

    def invalidate(self) -> None:
        """The values have changed where they lie."""

    def cached(self) -> list[Tensor]:
        """What is kept beside the copies, made from their values."""
        return []

    def check(self) -> None:
        """Asserts that the model still computes with what it was shown.

        Raises:
            ContractError: naming the parameter that was replaced.
        """
        for parameter, slot in zip(self._parameters, self._layout.slots, strict=True):
            if not parameter.requires_grad:
                raise ContractError(
                    f"'{slot.spec.name}' was frozen after dtrain.initialize; its moments and decay would go on, "
                    f"so freeze it before, and build a new engine"
                )
        for parameter, slot, address in zip(self._parameters, self._layout.slots, self._addresses, strict=True):
            if slot.spec.numel and parameter.data_ptr() != address:
                raise ContractError(
                    f"parameter '{slot.spec.name}' no longer lies in its flat buffer (it is {parameter.dtype} on "
                    f"{parameter.device}); do not call .to(), .half() or assign .data after dtrain.initialize"
                )


class ReplicaBuffer:
    """The compute replicas of one flat layout; zeros until they are first refreshed.

    Args:
        segment: this rank's slice of the layout.
        views: how the model sees them.
        comm: the ranks that share.

    Attributes:
        copies: the whole layout, each [numel].
        own: this rank's segment of each copy, [segment.numel]: what the master is cast into.
    """

    def __init__(self, segment: ArenaSegment, views: ParameterViews, comm: Communicator) -> None:
        self.layout = segment.layout
        self.views = views
        self._comm = comm
        self._take_over(segment)

    def _take_over(self, segment: ArenaSegment) -> None:
        self.copies = [self._comm.allocate(self.layout.numel, self.layout.dtype) for _ in range(self.views.num_copies)]
        self.own = [copy[segment.flat_start : segment.flat_start + segment.numel] for copy in self.copies]
        self.views.bind(self.copies)

    def start_all_gather(self) -> list[Pending]:
        """Starts the gather of all shards; all ranks call in the same order."""
        return [
            self._comm.all_gather(copy, own, label=f"{self.layout.name}{'/columns' if number else ''}")
            for number, (copy, own) in enumerate(zip(self.copies, self.own, strict=True))
        ]

    @property
    def held(self) -> list[Tensor]:
        """What this rank holds from one refresh to the next."""
        return [*self.copies, *self.views.cached()]

    @property
    def unsharded(self) -> list[Tensor]:
        """What it holds for as long as a group is gathered."""
        return []


class ShardedReplica(ReplicaBuffer):
    """Compute replicas of which each rank holds its shard; the whole layout exists only between gather and free.

    Every gather has new copies, so what a caller still holds of old ones stays what it was. While there are none,
    they are empty.
    """

    def _take_over(self, segment: ArenaSegment) -> None:
        self.own = [self._comm.allocate(segment.numel, self.layout.dtype) for _ in range(self.views.num_copies)]
        self._pending: list[Pending] = []
        self.reshard()

    def start_unshard(self) -> None:
        """Starts the gather of all shards; all ranks call in the same order."""
        with torch.inference_mode(False):
            self.copies = [own.new_empty(self.layout.numel) for own in self.own]
        self._pending = self.start_all_gather()

    def finish_unshard(self) -> None:
        """Waits for the gather; the model sees its result."""
        self._wait()
        with torch.inference_mode(False):
            self.views.bind(self.copies)

    def reshard(self) -> None:
        """Lets the whole go, after a gather that is under way."""
        self._wait()
        self.views.unbind()
        with torch.inference_mode(False):
            self.copies = [own.new_empty(0) for own in self.own]

    def _wait(self) -> None:
        for pending in self._pending:
            pending.wait()

    @property
    def held(self) -> list[Tensor]:
        """What this rank holds from one refresh to the next."""
        return self.own

    @property
    def unsharded(self) -> list[Tensor]:
        """What it holds for as long as a group is gathered."""
        return [*self.copies, *self.views.cached()]


class BufferPool:
    """Flat buffers that are used again by the next group of the same layout; padding stays zero in them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[object, list[Tensor]] = {}

    def take(self, key: object, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer that was given back under ``key``, or a new one of zeros."""
        free = self._free.get((key, numel, dtype))
        return free.pop() if free else torch.zeros(numel, dtype=dtype, device=self._device)

    def give(self, key: object, buffer: Tensor) -> None:
        """Takes ``buffer`` back."""
        self._free.setdefault((key, buffer.numel(), buffer.dtype), []).append(buffer)

    def idle(self) -> list[Tensor]:
        """The buffers that nobody uses now: between steps, all of them."""
        return [buffer for free in self._free.values() for buffer in free]
