"""The collectives of one rank among many that are not there: buffers are allocated as a transport does, none is sent.

A plan runs the engine with it on fake tensors, so it holds what a rank of that many would hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.distributed.communicator import (
    Communicator,
    GradientExchange,
    GradientSend,
    Handle,
    recorded,
    require_fp32,
)
from dtrain.distributed.host_memory import ring_schedule
from dtrain.distributed.process_group import AllToAllExchange
from dtrain.distributed.ring_exchange import RingExchange
from dtrain.distributed.schedule import Collective, CollectiveSchedule
from dtrain.distributed.single_rank import SingleRank

HOST, SOCKETS, NCCL = "host", "sockets", "nccl"
"""Transports: CPU ranks that read each other's memory, CPU ranks through sockets, and GPUs."""


def planned_ranks(world_size: int, transport: str, on_output: Callable[[Tensor], None]) -> Communicator:
    """Returns the communicator of rank 0 of ``world_size``.

    Args:
        world_size: number of ranks.
        transport: one of :data:`HOST`, :data:`SOCKETS`, :data:`NCCL`.
        on_output: called with the output of each all-gather.
    """
    cpu = torch.device("cpu")
    return SingleRank(cpu) if world_size == 1 else PlannedRanks(world_size, transport, on_output)


class _Held:
    """A collective in flight, which holds tensors until it is waited for."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = tensors

    def wait(self) -> None:
        self._tensors = ()


class _Announced:
    def __init__(self, tensor: Tensor, world_size: int) -> None:
        self._tensor = tensor
        self._world_size = world_size

    def wait(self) -> tuple[list[Tensor], list[int]]:
        return [self._tensor] * self._world_size, [0] * self._world_size


class PlannedRanks(Communicator):
    """Rank 0 of ``world_size``; the arguments are those of :func:`planned_ranks`."""

    def __init__(self, world_size: int, transport: str, on_output: Callable[[Tensor], None]) -> None:
        self.rank = 0
        self.world_size = world_size
        self.device = torch.device("cpu")
        self.schedule = CollectiveSchedule()
        self.process_group = None
        self._transport = transport
        self._on_output = on_output

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str) -> Handle:
        self.schedule.record("all_gather", label, output)
        self._on_output(output)
        return _Held(output, shard)

    def reduce_scatter_sum(
        self, output: Tensor, flat: Tensor, *, label: str, dtype: torch.dtype = torch.float32, gathers: bool = False
    ) -> Handle:
        require_fp32("reduce_scatter_sum", flat)
        self.schedule.record("reduce_scatter_sum", label, flat)
        if self._transport == SOCKETS or (self._transport == NCCL and dtype != torch.float32):
            return _Held(flat.to(dtype), torch.empty_like(flat, dtype=dtype))  # sent and received
        return _Held(flat)

    def all_to_all_single(self, output: Tensor, flat: Tensor, *, label: str) -> Handle:
        """As :meth:`dtrain.distributed.process_group.ProcessGroup.all_to_all_single`."""
        self.schedule.record("all_to_all_single", label, flat)
        return _Held(output, flat)

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
        self.schedule.record("all_to_all", label, recorded(input.dtype, total))
        return _Held(output, input)

    def all_reduce_max(self, tensor: Tensor, *, label: str) -> Handle:
        self.schedule.record("all_reduce_max", label, tensor)
        return _Held()

    def broadcast(self, tensor: Tensor, *, src: int = 0, label: str) -> None:
        self.schedule.record("broadcast", label, tensor)

    def gather_rows(self, row: Tensor, *, label: str) -> Tensor:
        self.schedule.record("gather_rows", label, row)
        return row.unsqueeze(0).expand(self.world_size, -1).contiguous()

    def exchange_text(self, text: str) -> list[str]:
        return [text] * self.world_size

    def announce(self, what: Collective, tensor: Tensor, weight: int = 0) -> _Announced:
        """As :meth:`dtrain.distributed.host_memory.HostMemory.announce`."""
        return _Announced(tensor, self.world_size)

    def gradient_exchange(self, sends: Sequence[GradientSend], num_early: int) -> GradientExchange:
        if self._transport != HOST or not sends:
            return AllToAllExchange(self, sends)
        schedule = ring_schedule(sends, num_early)
        return RingExchange(self, sends, self.allocate(schedule.capacity, torch.uint8), schedule)

    def over(self, group: dist.ProcessGroup) -> Communicator:
        raise NotImplementedError("a plan has one axis of ranks")

    def sibling(self) -> Communicator:
        return SingleRank(self.device)

    def barrier(self) -> None:
        """Returns at once: the other ranks are not there."""
