"""Compute replicas in flat buffers, the model's parameters as views of them, and a pool of reusable buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dtrain.distributed.communicator import Communicator, Pending
from dtrain.errors import ContractError
from dtrain.parameters.local_shards import require_trained
from dtrain.sharding.layout import ArenaSegment, FlatLayout


def slot_views(flat: Tensor, layout: FlatLayout) -> list[Tensor]:
    return [flat[slot.start : slot.stop].view(slot.spec.shape) for slot in layout.slots]


class ParameterViews:
    """Makes a model's parameters views of a flat buffer.

    The Parameter objects stay the same, so ties, user references and hooks survive. While no buffer is bound, every
    parameter is NaN in its own shape, at the cost of one element.

    Args:
        layout: layout of the flat buffer.
        parameters: the model's parameters by name.
        dtype: dtype of the parameters; None: the layout's.
    """

    num_copies = 1
    """Number of flat buffers that hold the replica."""

    def __init__(
        self, layout: FlatLayout, parameters: Mapping[str, nn.Parameter], dtype: torch.dtype | None = None
    ) -> None:
        self._layout = layout
        self._parameters = [parameters[slot.spec.name] for slot in layout.slots]
        device = self._parameters[0].device
        # NaN spreads into every result, so a read of a sharded parameter cannot pass for a plausible number
        nan = torch.full((), torch.nan, dtype=dtype or layout.dtype, device=device)
        self._placeholders = [nan.expand(slot.spec.shape) for slot in layout.slots]
        for parameter in self._parameters:
            parameter.grad = None  # else autograd would add the first gradient to it
        self.unbind()  # frees the original values; the masters have copied them: [Note: construction order]

    def bind(self, copies: Sequence[Tensor]) -> None:
        """Makes the parameters views of ``copies``, each [numel]."""
        self._set(slot_views(copies[0], self._layout))

    def unbind(self) -> None:
        self._set(self._placeholders)

    def _set(self, values: Sequence[Tensor]) -> None:
        self._addresses = [value.data_ptr() for value in values]
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.data = value

    def invalidate(self) -> None:
        """Drops what was derived from the values: they have changed in place."""

    def cached(self) -> list[Tensor]:
        """Tensors derived from the copies' values."""
        return []

    def check(self) -> None:
        """Asserts that the model still computes with the tensors that were bound.

        Raises:
            ContractError: naming the parameter that was replaced.
        """
        for parameter, slot in zip(self._parameters, self._layout.slots, strict=True):
            require_trained(slot.spec.name, parameter)
        for parameter, slot, address in zip(self._parameters, self._layout.slots, self._addresses, strict=True):
            # views of no element have no address of their own
            if slot.spec.numel and parameter.data_ptr() != address:
                raise ContractError(
                    f"parameter '{slot.spec.name}' no longer lies in its flat buffer (it is {parameter.dtype} on "
                    f"{parameter.device}); do not call .to(), .half() or assign .data after dtrain.initialize"
                )


class ReplicaBuffer:
    """Compute replicas of one flat layout, whole on this rank; zeros until they are first refreshed.

    Args:
        segment: this rank's slice of the layout.
        views: the model's parameters.
        comm: the ranks that share the layout.
        master: FP32 [segment.numel], the masters, if they are also the replica: [Note: FP32 replicas].

    Attributes:
        copies: the whole layout, each [numel].
        local: this rank's segment of each copy, [segment.numel]; the masters are cast into it.
        shares_master: whether ``local`` is the masters' own storage.
    """

    def __init__(
        self, segment: ArenaSegment, views: ParameterViews, comm: Communicator, master: Tensor | None = None
    ) -> None:
        self.layout = segment.layout
        self.views = views
        self._comm = comm
        self.shares_master = master is not None
        self._bind_local(segment, master)

    def _bind_local(self, segment: ArenaSegment, master: Tensor | None) -> None:
        self.copies = [master] if master is not None else self._allocate(self.layout.numel)
        self.local = [copy[segment.flat_start : segment.flat_start + segment.numel] for copy in self.copies]
        self.views.bind(self.copies)

    def _allocate(self, numel: int) -> list[Tensor]:
        return [self._comm.allocate(numel, self.layout.dtype) for _ in range(self.views.num_copies)]

    def start_all_gather(self) -> list[Pending]:
        """Starts the all-gather of all shards; all ranks call in the same order."""
        return [
            self._comm.all_gather(copy, local, label=f"{self.layout.name}{'/columns' if number else ''}")
            for number, (copy, local) in enumerate(zip(self.copies, self.local, strict=True))
        ]

    @property
    def persistent(self) -> list[Tensor]:
        """Tensors that this rank holds from one refresh to the next; without the masters' storage."""
        return [*([] if self.shares_master else self.copies), *self.views.cached()]

    @property
    def unsharded(self) -> list[Tensor]:
        """Tensors that this rank holds only while the group is unsharded."""
        return []


class ShardedReplica(ReplicaBuffer):
    """Compute replicas of which each rank holds its shard; the whole layout exists only while it is unsharded.

    Every unshard allocates new copies, so tensors that a caller kept do not change. While the replica is sharded, the
    copies are empty.
    """

    def _bind_local(self, segment: ArenaSegment, master: Tensor | None) -> None:
        self.local = [master] if master is not None else self._allocate(segment.numel)
        self._pending: list[Pending] = []
        self.reshard()

    def start_unshard(self) -> None:
        """Starts the all-gather; all ranks call in the same order."""
        with torch.inference_mode(False):  # else backward could not use what an evaluation has unsharded
            # private memory: other ranks read only ``local``. Its last use may still be queued: [Note: streams]
            self.copies = [local.new_empty(self.layout.numel) for local in self.local]
        self._pending = self.start_all_gather()

    def finish_unshard(self) -> None:
        """Waits for the all-gather and binds the parameters to its result."""
        self._wait()
        with torch.inference_mode(False):  # as in start_unshard
            self.views.bind(self.copies)

    def reshard(self) -> None:
        """Frees the whole layout; an all-gather in flight is waited for first, as [Note: buffer reuse] requires."""
        self._wait()
        self.views.unbind()
        with torch.inference_mode(False):
            self.copies = [local.new_empty(0) for local in self.local]

    def _wait(self) -> None:
        for pending in self._pending:
            pending.wait()

    @property
    def persistent(self) -> list[Tensor]:
        return [] if self.shares_master else self.local

    @property
    def unsharded(self) -> list[Tensor]:
        return [*self.copies, *self.views.cached()]


class BufferPool:
    """Flat buffers that the next group of the same layout reuses."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[object, list[Tensor]] = {}

    def take(self, key: object, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns a buffer that was given back under ``key``, or a new one of zeros.

        A key that stands for the slots of a layout keeps the padding zero, because its users write the same elements.
        """
        free = self._free.get((key, numel, dtype))
        return free.pop() if free else torch.zeros(numel, dtype=dtype, device=self._device)

    def give(self, key: object, buffer: Tensor) -> None:
        self._free.setdefault((key, buffer.numel(), buffer.dtype), []).append(buffer)

    def idle(self) -> list[Tensor]:
        return [buffer for free in self._free.values() for buffer in free]
