"""Implements the collectives of rank 0 without other ranks: allocates a transport's buffers and sends nothing.

A plan runs the engine with it on fake tensors, so it holds what a rank of that many would hold; or on real ones, so it
computes what such a rank would compute. Then most collectives copy this rank's own data in place of what others send.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from dtrain.distributed.communicator import (
    Communicator,
    GradientExchange,
    GradientSend,
    Handle,
    recorded,
    require_fp32,
)
from dtrain.distributed.schedule import Collective, CollectiveSchedule
from dtrain.distributed.transport.all_to_all_exchange import AllToAllExchange
from dtrain.distributed.transport.host_memory import ring_schedule
from dtrain.distributed.transport.ring_exchange import RingExchange
from dtrain.distributed.transport.single_rank import SingleRank
from dtrain.precision.fake import is_fake

HOST, SOCKETS, NCCL = "host", "sockets", "nccl"
"""Transports: CPU ranks that read each other's memory, CPU ranks through sockets, and GPUs."""
WORLD, SHARD, REPLICATE = "all ranks", "dp_shard", "dp_replicate"
"""Axes of the mesh, by the names in tables."""


@dataclass(frozen=True)
class Transfer:
    """A collective of ``world_size`` ranks along an axis, ``stride`` apart, in which a rank receives ``nbytes``."""

    op: str
    nbytes: int
    world_size: int
    label: str = ""
    axis: str = WORLD
    stride: int = 1


class TransferLog:
    """Interface that ``PlannedRanks`` calls for each collective; this base class records nothing."""

    def start(self, transfer: Transfer) -> int:
        """Returns the number of ``transfer``, which starts now."""
        return 0

    def wait(self, number: int) -> None:
        """The rank waits for a transfer."""

    def gathered(self, output: Tensor) -> None:
        """An all-gather is about to start; ``output`` will be full weights."""

    def absent(self) -> AbstractContextManager[None]:
        """Returns a context whose work stands for that of other ranks."""
        return nullcontext()


def planned_ranks(world_size: int, transport: str, device: torch.device, log: TransferLog) -> Communicator:
    """Returns the communicator of rank 0 of ``world_size``, whose tensors are on ``device``.

    ``transport`` is one of ``HOST``, ``SOCKETS``, ``NCCL``; ``log`` is told of the transfers.
    """
    if world_size == 1:
        return _PlannedRank(device) if transport == NCCL else SingleRank(device)
    return PlannedRanks(world_size, transport, device, log)


class _PlannedRank(SingleRank):
    """A single rank on a device beside the host."""

    device_is_host = False


class _Held:
    """A collective in flight, which holds tensors until it is waited for."""

    def __init__(self, log: TransferLog, number: int, *tensors: Tensor) -> None:
        self._log = log
        self._number: int | None = number
        self._tensors = tensors

    def wait(self) -> None:
        if self._number is not None:
            self._log.wait(self._number)
        self._number, self._tensors = None, ()


@dataclass(frozen=True)
class _Announced:
    tensor: Tensor
    weight: int
    world_size: int

    def wait(self) -> tuple[list[Tensor], list[int]]:
        return [self.tensor] * self.world_size, [self.weight] * self.world_size


class PlannedRanks(Communicator):
    """Rank 0 of several, see ``planned_ranks``; ``axis`` and ``stride`` are those of its transfers."""

    def __init__(
        self,
        world_size: int,
        transport: str,
        device: torch.device,
        log: TransferLog,
        axis: str = WORLD,
        stride: int = 1,
    ) -> None:
        self.rank, self.world_size, self.device = 0, world_size, device
        self.schedule, self.process_group = CollectiveSchedule(), None
        self._transport, self._log = transport, log
        self._axis, self._stride = axis, stride

    @property
    def device_is_host(self) -> bool:
        return self._transport != NCCL

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str) -> Handle:
        self._log.gathered(output)
        # in each row; a copy, because the shard may lie in one
        self._fill(output.view(self.world_size, -1), shard if is_fake(shard) else shard.clone())
        return self._start("all_gather", label, output, output.nbytes, output, shard)

    def reduce_scatter_sum(
        self, output: Tensor, flat: Tensor, *, label: str, dtype: torch.dtype = torch.float32, gathers: bool = False
    ) -> Handle:
        require_fp32("reduce_scatter_sum", flat)
        self._fill(output, flat.view(self.world_size, -1)[self.rank])
        held = [flat]
        if self._transport == SOCKETS or (self._transport == NCCL and dtype != torch.float32):
            held = [flat.to(dtype), torch.empty_like(flat, dtype=dtype)]
        return self._start("reduce_scatter_sum", label, flat, flat.numel() * dtype.itemsize, *held)

    def all_to_all_single(self, output: Tensor, flat: Tensor, *, label: str) -> Handle:
        """Does what ``dtrain.distributed.transport.process_group.ProcessGroup.all_to_all_single`` does."""
        self._fill(output, flat)
        return self._start("all_to_all_single", label, flat, flat.nbytes, output, flat)

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
        self._fill(output, output.new_zeros(()))
        return self._start("all_to_all", label, recorded(input.dtype, total), output.nbytes, output, input)

    def all_reduce_max(self, tensor: Tensor, *, label: str) -> Handle:
        return self._start("all_reduce_max", label, tensor, 2 * tensor.nbytes)

    def broadcast(self, tensor: Tensor, *, src: int = 0, label: str) -> None:
        self._start("broadcast", label, tensor, tensor.nbytes).wait()

    def gather_rows(self, row: Tensor, *, label: str) -> Tensor:
        self._start("gather_rows", label, row, self.world_size * row.nbytes).wait()
        return row.unsqueeze(0).expand(self.world_size, -1).contiguous()

    def exchange_text(self, text: str) -> list[str]:
        return [text] * self.world_size

    def announce(self, what: Collective, tensor: Tensor, weight: int = 0, part: Tensor | None = None) -> _Announced:
        """As ``HostMemory.announce``; the engine itself reads the memory."""
        return _Announced(tensor if part is None else part, weight, self.world_size)

    def _start(self, op: str, label: str, recorded: Tensor, nbytes: int, *held: Tensor) -> _Held:
        """Starts a transfer of ``nbytes``, of which each rank has an equal part; the schedule gets ``recorded``."""
        self.schedule.record(op, label, recorded)
        received = nbytes * (self.world_size - 1) // self.world_size
        transfer = Transfer(op, received, self.world_size, label, self._axis, self._stride)
        return _Held(self._log, self._log.start(transfer), *held)

    def _fill(self, output: Tensor, values: Tensor) -> None:
        """Gives ``output`` values that the engine can compute with."""
        with self._log.absent():
            if not is_fake(output):
                output.copy_(values)

    def gradient_exchange(self, sends: Sequence[GradientSend], num_early: int) -> GradientExchange:
        if self._transport != HOST or not sends:
            return _PlannedExchange(self, sends)
        schedule = ring_schedule(sends, num_early)
        return RingExchange(self, sends, self.allocate(schedule.capacity, torch.uint8), schedule)

    def split(self, shard_size: int) -> tuple[Communicator, Communicator]:
        alike = (self._transport, self.device, self._log)
        shard = PlannedRanks(shard_size, *alike, SHARD)
        replicate = PlannedRanks(self.world_size // shard_size, *alike, REPLICATE, shard_size)
        shard.schedule = replicate.schedule = self.schedule
        return shard, replicate

    def sibling(self) -> Communicator:
        return SingleRank(self.device)

    def barrier(self) -> None:
        """Returns at once: the other ranks are not there."""


class _PlannedExchange(AllToAllExchange):
    def shards(self, index: int, buffer: Tensor) -> Sequence[Tensor]:
        """As the base class; of a fake buffer the shard of rank 0 stands for all, because 4,096 views take a while."""
        if not is_fake(buffer):
            return super().shards(index, buffer)
        world_size = self._comm.world_size
        return [buffer.narrow(0, 0, self.sends[index].numel // world_size)] * world_size
