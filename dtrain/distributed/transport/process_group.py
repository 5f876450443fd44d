"""Collectives over a process group: NCCL, and what gloo has in common with it.

``reduce_scatter_sum`` on gloo, or in a dtype narrower than FP32, is an all-to-all of the shards and a local sum in rank
order, because backends sum in the dtype of their input. On gloo that also takes half the time of its own
reduce-scatter, which blocks its caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.distributed.communicator import (
    Communicator,
    GradientExchange,
    GradientSend,
    Handle,
    byte_view,
    recorded,
    require_fp32,
)
from dtrain.distributed.consensus import on_every_rank
from dtrain.distributed.schedule import Collective, CollectiveSchedule, Waiting
from dtrain.distributed.transport.all_to_all_exchange import AllToAllExchange
from dtrain.distributed.transport.descriptors import reserve_descriptors
from dtrain.distributed.transport.gradient_buffers import MAX_BYTES_IN_FLIGHT
from dtrain.distributed.transport.own_groups import close_at_exit, uses_group
from dtrain.distributed.transport.sums import sum_in_order
from dtrain.errors import CommunicationError, ConfigError

# torch 2.13 renames the two; dtrain supports torch from 2.11 on.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_MAX_TEXT_BYTES = 2**30  # of a rank; refused before it is allocated


class Choose(Protocol):
    """Chooses the transport over ``group``: ``dtrain.distributed.transport.choose.make_communicator``."""

    def __call__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        world: Communicator | None = None,
        shared_memory: bool = ...,
    ) -> Communicator: ...


class ProcessGroup(Communicator):
    """Collectives over ``group``.

    Args:
        group: two or more ranks.
        device: where the tensors of the collectives live.
        choose: makes the communicators of the axes and the sibling.
        schedule: shared with the communicators of other axes; None: a new one.

    Attributes:
        ranks: of the run, by rank in ``group``; messages name these.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        choose: Choose,
        schedule: CollectiveSchedule | None = None,
    ) -> None:
        self.process_group: dist.ProcessGroup | None = group
        self.device = device
        self._choose = choose
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_process_group_ranks(group)
        self.world_size = dist.get_world_size(group)
        self.schedule = CollectiveSchedule() if schedule is None else schedule
        self._row_sums: list[_RowSum] = []  # in flight, in their order
        self._axes: dict[int, tuple[Communicator, Communicator]] = {}  # by shard size
        uses_group(self)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str) -> Handle:
        what = self.schedule.record("all_gather", label, output)
        return self._start(what, all_gather_single, byte_view(output), byte_view(shard))

    def reduce_scatter_sum(
        self, output: Tensor, flat: Tensor, *, label: str, dtype: torch.dtype = torch.float32, gathers: bool = False
    ) -> Handle:
        require_fp32("reduce_scatter_sum", flat)
        if self.device.type == "cpu" or dtype != torch.float32:  # else the backend would sum in ``dtype``
            self._finish_row_sums()
            received = torch.empty_like(flat, dtype=dtype)
            arrival = self.all_to_all_single(received, flat.to(dtype), label=label)
            self._row_sums.append(_RowSum(self.schedule, arrival, received.view(self.world_size, -1).unbind(), output))
            return self._row_sums[-1]
        what = self.schedule.record("reduce_scatter_sum", label, flat)
        return self._start(what, reduce_scatter_single, output, flat)

    def _finish_row_sums(self) -> None:
        """Finishes the oldest sums as long as what they receive exceeds the limit; one may, so that two overlap."""
        self._row_sums = [row_sum for row_sum in self._row_sums if row_sum.nbytes]
        # by the sizes alone, which are equal on all ranks, so that all wait for the same ones
        while len(self._row_sums) > 1 and sum(row_sum.nbytes for row_sum in self._row_sums) > MAX_BYTES_IN_FLIGHT:
            self._row_sums.pop(0).wait()

    def all_to_all_single(self, output: Tensor, flat: Tensor, *, label: str) -> Handle:
        """Starts sending shard r of ``flat`` [world_size * n] to rank r; ``output`` gets this rank's of all ranks."""
        what = self.schedule.record("all_to_all_single", label, flat)
        return self._start(what, dist.all_to_all_single, output, flat)

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        *,
        total: int,
        label: str,
    ) -> Handle:
        what = self.schedule.record("all_to_all", label, recorded(input.dtype, total))
        sizes = list(output_sizes), list(input_sizes)
        return self._start(what, dist.all_to_all_single, byte_view(output), byte_view(input), *sizes)

    def all_reduce_max(self, tensor: Tensor, *, label: str) -> Handle:
        what = self.schedule.record("all_reduce_max", label, tensor)
        return self._start(what, dist.all_reduce, tensor, dist.ReduceOp.MAX)

    def broadcast(self, tensor: Tensor, *, src: int = 0, label: str) -> None:
        what = self.schedule.record("broadcast", label, tensor)
        if tensor.numel() > 0:
            self._call(what, dist.broadcast, tensor, group_src=src)

    def gather_rows(self, row: Tensor, *, label: str) -> Tensor:
        return self._gather(self.schedule.record("gather_rows", label, row), row)

    def _gather(self, what: Collective, row: Tensor) -> Tensor:
        rows = row.new_empty(self.world_size * row.numel())
        self._call(what, all_gather_single, rows, row.contiguous())
        return rows.view(self.world_size, row.numel())

    def exchange_text(self, text: str) -> list[str]:
        """Returns the text of every rank, in rank order; it is sent as padded UTF-8 bytes, never pickled."""
        payload = text.encode()
        size = torch.tensor([len(payload)], dtype=torch.int64, device=self.device)
        sizes = self.gather_rows(size, label="text size").flatten().tolist()
        if min(sizes) < 0 or max(sizes) > _MAX_TEXT_BYTES:
            raise CommunicationError(
                f"rank {self.ranks[self.rank]}: expected texts of 0 to {_MAX_TEXT_BYTES} bytes, got {sizes}"
            )
        # without its length, which may differ between the groups of one axis, whose order is the same
        what = self.schedule.record("exchange_text", "text", recorded(torch.uint8, 0))
        if not max(sizes):  # a gather of no bytes would be a collective for nothing
            return [""] * self.world_size
        # without a list of Python numbers, which would hold the GIL while another thread trains
        padded = torch.from_numpy(np.frombuffer(bytearray(payload.ljust(max(sizes), b"\0")), dtype=np.uint8))
        rows = self._gather(what, padded.to(self.device)).cpu().numpy()
        return [row[:length].tobytes().decode() for row, length in zip(rows, sizes, strict=True)]

    def gradient_exchange(self, sends: Sequence[GradientSend], num_early: int) -> GradientExchange:
        return AllToAllExchange(self, sends)

    def foreign_nbytes(self) -> int:
        return sum(axis.foreign_nbytes() for axes in self._axes.values() for axis in axes)

    def split(self, shard_size: int) -> tuple[Communicator, Communicator]:
        if shard_size not in self._axes:
            shard, replicate = (self._choose(group, self.device, world=self) for group in self._axis_groups(shard_size))
            self._axes[shard_size] = shard, replicate
        return self._axes[shard_size]

    def _axis_groups(self, shard_size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        group = self.process_group
        assert group is not None
        known = _axis_groups.setdefault(group, {})
        if shard_size not in known:
            backend = group._get_backend(self.device)
            timeout = getattr(backend.options, "_timeout", None)  # torch's fake backend has no options
            on_every_rank(self, "", partial(reserve_descriptors, self.world_size), ConfigError)
            everyone = dist.get_process_group_ranks(group)
            own = everyone[self.rank]
            # torch names a group by its ranks and the number of groups that a rank has, and ranks with another name
            # for it would wait for each other: each makes groups of its own until all have as many
            count = max(map(int, self.exchange_text(str(_num_groups()))))
            for _ in range(count - _num_groups()):
                dist.new_group([own], backend="gloo", use_local_synchronization=True)
            first = self.rank - self.rank % shard_size
            # each rank makes only the groups that it joins: all of them would be as many as there are ranks
            shard, replicate = (
                dist.new_group(ranks, timeout=timeout, backend=backend.name(), use_local_synchronization=True)
                for ranks in (everyone[first : first + shard_size], everyone[self.rank - first :: shard_size])
            )
            close_at_exit(shard)
            close_at_exit(replicate)
            known[shard_size] = shard, replicate
        return known[shard_size]

    def sibling(self) -> Communicator:
        group = self.process_group
        assert group is not None
        if group not in _siblings:
            timeout = group._get_backend(self.device).options._timeout
            self.barrier()  # a rank that makes another call instead is named here
            on_every_rank(self, "", partial(reserve_descriptors, self.world_size), ConfigError)
            with self.waiting(self.schedule.current("a second process group")):
                second = dist.new_group(dist.get_process_group_ranks(group), timeout=timeout, backend="gloo")
            close_at_exit(second)
            _siblings[group] = self._choose(second, torch.device("cpu"), shared_memory=False)
        return _siblings[group]

    def release(self) -> None:
        for axis in (axis for axes in self._axes.values() for axis in axes):
            axis.release()
        self._axes.clear()
        if self.process_group is not None and self.process_group in _siblings:
            _siblings.pop(self.process_group).release()
        self.process_group = None

    def waiting(self, what: Collective) -> Waiting:
        """Returns a context in which this rank waits for ``what``."""
        return self.schedule.waiting(self.ranks[self.rank], what)

    def _call(self, what: Collective, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.flush()  # before anything else: backends match collectives by their order
        with self.waiting(what):
            return collective(*args, group=self.process_group, **kwargs)

    def _start(self, what: Collective, collective: Callable[..., Any], *args: Any) -> Handle:
        return _WorkHandle(self._call(what, collective, *args, async_op=True), self.schedule, self.waiting(what))


class _WorkHandle:
    """A collective of the backend."""

    def __init__(self, work: Any, schedule: CollectiveSchedule, waiting: Waiting) -> None:
        self._work = work
        self._schedule = schedule
        self._waiting = waiting

    def wait(self) -> None:
        work, self._work = self._work, None  # before the wait: torch's handle of one that failed holds garbage
        if work is None:
            self._schedule.require_working()
            return
        with self._waiting:
            work.wait()


class _RowSum:
    """An all-to-all, and the sum of what arrives."""

    def __init__(self, schedule: CollectiveSchedule, arrival: Handle, rows: Sequence[Tensor], output: Tensor) -> None:
        self._schedule = schedule
        self._in_flight: tuple[Handle, Sequence[Tensor], Tensor] | None = arrival, rows, output

    @property
    def nbytes(self) -> int:
        """Bytes that it holds until it is finished."""
        return sum(row.nbytes for row in self._in_flight[1]) if self._in_flight is not None else 0

    def wait(self) -> None:
        if self._in_flight is None:
            self._schedule.require_working()
            return
        arrival, rows, output = self._in_flight
        arrival.wait()
        self._in_flight = None  # a collective that is complete holds no memory
        sum_in_order(output, rows, rows[0].dtype)


# by process group; torch keeps a group until all end, so those of each engine would pile up
_siblings: WeakKeyDictionary[dist.ProcessGroup, Communicator] = WeakKeyDictionary()
_axis_groups: WeakKeyDictionary[dist.ProcessGroup, dict[int, tuple[dist.ProcessGroup, dist.ProcessGroup]]] = (
    WeakKeyDictionary()  # of a mesh, by shard size
)


def _num_groups() -> int:
    """Returns the number of process groups that this rank is a member of."""
    return len(dist.distributed_c10d._world.pg_names)
