"""Compute replicas in flat buffers, and the model's parameters as views of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.distributed.communicator import Communicator, Handle
from dtrain.errors import ContractError
from dtrain.parameters.local_shards import require_trained
from dtrain.precision.float8.cast import E4M3
from dtrain.sharding.layout import FlatLayout
from dtrain.sharding.placement import Placements
from dtrain.sharding.storage_pool import FlatTensor, StoragePool


def slot_views(flat: Tensor, layout: FlatLayout) -> list[Tensor]:
    return list(FlatTensor(flat).views(layout.places))


def _outside_inference_mode() -> AbstractContextManager[Any]:
    """Inside, tensors are ordinary ones: else backward could not use what an evaluation has unsharded."""
    # entered only if needed, because it takes as long as a small operation
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


class ParameterViews:
    """Makes a model's parameters views of a flat buffer.

    The Parameter objects stay the same, so ties, user references and hooks survive. While no buffer is bound, every
    parameter is NaN in its own shape, at the cost of one element. Until the first ``bind`` or ``unbind`` the
    parameters keep their own values.

    Args:
        layout: layout of the flat buffer.
        parameters: the model's parameters by name.
        dtype: dtype of the parameters; None: the layout's.

    Attributes:
        parameters: those of the flat buffer by name, in the order of its slots.
    """

    num_copies = 1
    """Number of flat buffers that hold the replica."""

    def __init__(
        self, layout: FlatLayout, parameters: Mapping[str, nn.Parameter], dtype: torch.dtype | None = None
    ) -> None:
        self._layout = layout
        self.parameters = {slot.spec.name: parameters[slot.spec.name] for slot in layout.slots}
        device = next(iter(self.parameters.values())).device
        # NaN spreads into every result, so a read of a sharded parameter cannot pass for a plausible number
        nan = torch.full((), torch.nan, dtype=dtype or layout.dtype, device=device)
        self._placeholders = [nan.expand(slot.spec.shape) for slot in layout.slots]
        self._values: Sequence[Tensor] = []
        self._addresses: list[int] = []  # of the values, once they are checked
        for parameter in self.parameters.values():
            parameter.grad = None  # else autograd would add the first gradient to it

    def bind(self, copies: Sequence[FlatTensor]) -> None:
        """Makes the parameters views of ``copies``, each [numel]."""
        self._set(copies[0].views(self._layout.places))

    def unbind(self) -> None:
        self._set(self._placeholders)

    def _set(self, values: Sequence[Tensor]) -> None:
        self._values, self._addresses = values, []
        for parameter, value in zip(self.parameters.values(), values, strict=True):
            parameter.data = value

    def open_weights(self, names: Collection[str]) -> None:
        """Lets the parameters called ``names``, which now hold weights, be read as they are."""

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
        self._addresses = self._addresses or [value.data_ptr() for value in self._values]
        is_trained = self._layout.is_trained
        for (name, parameter), address in zip(self.parameters.items(), self._addresses, strict=True):
            if is_trained and not parameter.requires_grad:
                require_trained(name, parameter)
            # views of no element have no address of their own
            if parameter.data_ptr() != address and parameter.numel():
                raise ContractError(
                    f"parameter '{name}' no longer lies in its flat buffer (it is {parameter.dtype} on "
                    f"{parameter.device}); do not call .to(), .half() or assign .data after dtrain.initialize"
                )


class Replica:
    """Compute replica of one flat buffer; its values are zero until it is first refreshed.

    It is whole on this rank, or sharded: then each rank holds its shard, and the whole exists only while it is
    unsharded. Every unshard takes memory without another reference, so tensors that a caller kept do not change.

    [Note: FP32 replicas] An FP32 replica has the numbers of its master, so the master is this rank's part of it: the
    update writes it once and casts nothing. Other ranks read it in the all-gather, to which [Note: buffer reuse]
    applies as to any replica: a master is written by an update, after the vote, or by a load, after the ranks have
    agreed on a checkpoint. Segments start on chunks, so parameters have the alignment of a buffer of their own.

    Args:
        layout: layout of the flat buffer.
        views: the model's parameters.
        comm: the ranks that share the layout.
        placements: a row of the stage table.
        pool: memory of unsharded copies.
        is_offloaded: whether the masters lie in the memory of the host: [Note: offload].

    Attributes:
        flat: the copies with their views; none while it is sharded.
        pool: see above.
        local: this rank's part of each copy; the masters are cast into it.
        is_sharded: whether this rank holds only its part between uses.
        is_gathered: whether a change of ``local`` is followed by an all-gather: other ranks own the rest.
    """

    def __init__(
        self,
        layout: FlatLayout,
        views: ParameterViews,
        comm: Communicator,
        placements: Placements,
        pool: StoragePool,
        *,
        is_offloaded: bool = False,
    ) -> None:
        self.layout = layout
        self._is_offloaded = is_offloaded
        self.views = views
        self._comm = comm
        self.pool = pool
        self._pending: list[Handle] = []
        self._owned = placements.master.segment(layout, comm.rank)
        held = placements.compute.segment(layout, comm.rank).numel
        self.is_sharded = held < layout.numel
        self.is_gathered = self._owned.numel < held
        # shared, if other ranks read it
        allocate = comm.allocate if self._owned.numel < layout.numel else partial(torch.zeros, device=comm.device)
        tensors = [allocate(held, dtype=layout.dtype) for _ in range(views.num_copies)]
        self.local = tensors if self.is_sharded else [self._owned.of(copy) for copy in tensors]
        self.flat = [] if self.is_sharded else [FlatTensor(copy) for copy in tensors]

    def attach(self) -> None:
        """Makes the model's parameters views of the replica, which frees their own values."""
        self.views.unbind()
        if not self.is_sharded:
            self.bind()

    def bind(self) -> None:
        """Makes the model's parameters views of the copies."""
        with _outside_inference_mode():
            self.views.bind(self.flat)

    @property
    def copies(self) -> list[Tensor]:
        """The whole flat buffer, each [numel]; none while it is sharded."""
        return [flat.tensor for flat in self.flat]

    @property
    def shares_master(self) -> bool:
        """Whether the masters are stored in ``local``: [Note: FP32 replicas]."""
        return self.layout.is_trained and self.layout.dtype == torch.float32 and not self._is_offloaded

    @property
    def is_float8(self) -> bool:
        return self.layout.dtype == E4M3

    def start_gather(self) -> list[Handle]:
        """Starts the all-gather after a change of ``local``, if there is any; all ranks call in the same order."""
        return self._start_all_gather() if self.is_gathered else []

    def _start_all_gather(self) -> list[Handle]:
        return [
            self._comm.all_gather(copy, local, label=f"{self.layout.name}{'/columns' if number else ''}")
            for number, (copy, local) in enumerate(zip(self.copies, self.local, strict=True))
        ]

    def start_unshard(self) -> None:
        """Starts to make a sharded replica whole."""
        with _outside_inference_mode():
            # private memory: other ranks read only ``local``. Its last use may still be queued: [Note: streams]
            self.flat = [self.pool.take(self.layout.numel, local.dtype, local.device) for local in self.local]
        self._pending = self._start_all_gather()

    def unshard(self) -> None:
        """Waits until the replica is whole and binds the parameters to it."""
        self._wait()
        self.bind()

    def reshard(self) -> None:
        """Frees what other ranks own; waits for an all-gather in flight first, as [Note: buffer reuse] requires."""
        self._wait()
        self.views.unbind()
        for flat in self.flat:
            self.pool.give(flat)
        self.flat = []

    def _wait(self) -> None:
        pending, self._pending = self._pending, []  # a handle keeps its output alive
        for handle in pending:
            handle.wait()

    @property
    def persistent(self) -> list[Tensor]:
        """Tensors that this rank holds from one refresh to the next; without the masters' storage."""
        if self.is_sharded:
            return [] if self.shares_master else self.local
        if not self.shares_master:
            return [*self.copies, *self.views.cached()]
        return [self.copies[0][: self._owned.start], self.copies[0][self._owned.stop :]]

    @property
    def unsharded(self) -> list[Tensor]:
        """Tensors that this rank holds only while the group is unsharded."""
        return [*self.copies, *self.views.cached()] if self.is_sharded else []
