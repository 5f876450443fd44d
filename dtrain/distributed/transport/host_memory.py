"""Collectives of CPU ranks of one host, which read each other's buffers.

Buffers from ``HostMemory.allocate`` are read in place. Only a ready message is sent, through a pipe: one for all
buffers announced before the first wait. Small rows are sent so too, all else through the process group; order,
failures, time-outs and bits are the same. A rank that has received a ready message sees the sender's stores, because
writing and reading a pipe are system calls that take its lock, which orders memory on x86 and on ARM. The weight of a
micro-batch lies in the ready messages of its gradients.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

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
from dtrain.distributed.logging import logger
from dtrain.distributed.schedule import Collective, CollectiveSchedule
from dtrain.distributed.transport.connections import Connections
from dtrain.distributed.transport.gloo_group import GlooGroup
from dtrain.distributed.transport.gradient_buffers import MAX_BYTES_IN_FLIGHT
from dtrain.distributed.transport.messages import Message
from dtrain.distributed.transport.process_group import Choose
from dtrain.distributed.transport.ring import RingSchedule
from dtrain.distributed.transport.ring_exchange import RingExchange
from dtrain.distributed.transport.shared_memory import SharedMemory
from dtrain.distributed.transport.sums import sum_in_order
from dtrain.errors import DivergenceError

_ENTRY = struct.Struct("<5q")  # number of the collective, region, offset, bytes, weight of a buffer
_ALIGNMENT = 64  # bytes; of the slots of the ring
_MESSAGE_BYTES = 16 * 2**20  # of the buffers of a message, after which it is sent although no rank waits for it yet
_MESSAGE_ENTRIES = 16  # largest number of buffers of one message


class HostMemory(GlooGroup):
    """Collectives over ``group``, whose ranks are CPU ranks of one host.

    Args:
        group: two or more ranks.
        device: the CPU.
        choose: makes the communicators of the axes and the sibling.
        schedule: shared with the communicators of other axes; None: a new one.
        messages: of another communicator over ``group``; None: new connections.
        world: if this is an axis of a mesh, the communicator over all ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        choose: Choose,
        schedule: CollectiveSchedule | None = None,
        messages: Connections | None = None,
        world: Communicator | None = None,
    ) -> None:
        super().__init__(group, device, choose, schedule, messages)
        self._ready_message = _ReadyMessage(self)
        members = None
        if world is not None and world.process_group is not None:
            everyone = dist.get_process_group_ranks(world.process_group)
            members = [everyone.index(rank) for rank in dist.get_process_group_ranks(group)]
        # all groups of an axis succeed or fail together: the collectives of one that cannot share memory are others
        self.memory = SharedMemory(self.rank, (world or self).exchange_text, members)
        self._published: dict[tuple[int, int], Announcement] = {}  # by address and bytes
        self._written: set[tuple[int, int]] = set()  # sums that this rank has written, or will write, to all ranks

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns zeros [numel], of shared memory unless an allocation has failed on some rank."""
        if numel and not self.memory.unsupported_reason:
            storage = self.memory.allocate(numel * dtype.itemsize)
            if storage is not None:
                return torch.empty(0, dtype=dtype).set_(storage, 0, (numel,))  # type: ignore[call-overload,no-any-return]
            logger.info(f"buffers are sent through sockets, not shared memory: {self.memory.unsupported_reason}")
        return super().allocate(numel, dtype)

    def is_shared(self, tensor: Tensor) -> bool:
        """Whether the other ranks can read ``tensor`` in place; the same on all ranks."""
        return self.memory.find(tensor) is not None

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str) -> Handle:
        extent = _extent(shard)
        announcement = self._published.get(extent)
        if announcement is None and not self.is_shared(shard):
            return super().all_gather(output, shard, label=label)
        what = self.schedule.record("all_gather", label, output)
        if extent in self._written:  # only to know that the other ranks have written theirs
            self._written.discard(extent)
            return _Read(self.announce(what, shard), output)
        return _CopyRead(announcement or self.announce(what, byte_view(shard)), byte_view(output))

    def publish(self, shards: Sequence[Tensor]) -> None:
        shared = [shard for shard in map(byte_view, shards) if self.is_shared(shard)]
        self._published = {_extent(shard): self.announce(self.schedule.current("publish"), shard) for shard in shared}
        for announcement in self._published.values():  # before the next vote: [Note: buffer reuse]
            announcement.wait()

    def reduce_scatter_sum(
        self, output: Tensor, flat: Tensor, *, label: str, dtype: torch.dtype = torch.float32, gathers: bool = False
    ) -> Handle:
        if not self.is_shared(flat):
            return super().reduce_scatter_sum(output, flat, label=label, dtype=dtype, gathers=gathers)
        require_fp32("reduce_scatter_sum", flat)
        # rounded by its reader, so in no memory of its own
        what = self.schedule.record("all_to_all_single", label, recorded(dtype, flat.numel()))
        if gathers:
            self._written.add(_extent(output))
        own = flat.view(self.world_size, -1)[self.rank]
        return _SumRead(self.announce(what, flat, part=own), output, dtype, gathers)

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
        location = self.memory.find(input)
        if location is None:
            return super().all_to_all(output, input, output_sizes, input_sizes, total=total, label=label)
        what = self.schedule.record("all_to_all", label, recorded(input.dtype, total))
        self.flush()
        # a message of its own: a buffer announced with others has one size on all ranks
        entry = struct.pack(f"<{3 + self.world_size}q", what.number, *location, *input_sizes)
        with self.waiting(what):
            message = self.messages.send(what, entry)
        return _PartsRead(self, what, message, output.split(list(output_sizes)))

    def gradient_exchange(self, sends: Sequence[GradientSend], num_early: int) -> GradientExchange:
        if sends:
            schedule = ring_schedule(sends, num_early)
            memory = self.allocate(schedule.capacity, torch.uint8)
            if self.is_shared(memory):  # else the allocation failed on some rank, and is private on all
                return RingExchange(self, sends, memory, schedule)
        return super().gradient_exchange(sends, num_early)

    def foreign_nbytes(self) -> int:
        return super().foreign_nbytes() + self.memory.foreign_nbytes()

    def release(self) -> None:
        super().release()
        self._published.clear()
        self.memory.release()

    def announce(self, what: Collective, tensor: Tensor, weight: int = 0, part: Tensor | None = None) -> Announcement:
        """Announces ``tensor``, which is shared, in one order on all ranks; this rank reads only ``part`` of theirs."""
        location = self.memory.find(tensor)
        assert location is not None
        message = self._ready_message
        announcement = Announcement(self, what, tensor, message, tensor if part is None else part)
        message.entries.append(_ENTRY.pack(what.number, *location, tensor.nbytes, weight))
        message.last, message.first = what, message.first or what
        message.nbytes += tensor.nbytes
        # by the sizes alone, which are equal on all ranks, so that all send at the same point
        if message.nbytes >= _MESSAGE_BYTES or len(message.entries) == _MESSAGE_ENTRIES:
            self.flush()
        return announcement

    def flush(self) -> None:
        message = self._ready_message
        if message.entries:
            # first: a failure below must not leave the next buffers in a message that is never sent
            self._ready_message = _ReadyMessage(self)
            message.send()


def ring_schedule(sends: Sequence[GradientSend], num_early: int) -> RingSchedule:
    """Returns the slots of ``sends``, of which the last ``num_early`` are opened before the others are sent."""
    sizes = [-(-send.nbytes // _ALIGNMENT) * _ALIGNMENT for send in sends]
    return RingSchedule(sizes, num_early, MAX_BYTES_IN_FLIGHT)


def _extent(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes


class _ReadyMessage:
    """The locations of buffers that are ready; sent when a rank waits for one of them, or earlier.

    Attributes:
        entries: one for each buffer.
        nbytes: of the buffers.
        first, last: their collectives.
    """

    def __init__(self, comm: HostMemory) -> None:
        self._comm = comm
        self.first: Collective | None = None
        self.last = Collective(0, "")
        self.entries: list[bytes] = []
        self.nbytes = 0
        self._message: Message | None = None  # once it is sent

    def send(self) -> None:
        what = self.last.joined(self.first or self.last)
        with self._comm.waiting(what):
            self._message = self._comm.messages.send(what, b"".join(self.entries))

    def require_sent(self) -> None:
        """Sends the message unless that has been tried."""
        if self._message is None:
            self._comm.flush()

    @property
    def is_received(self) -> bool:
        """Whether ``receive`` returns at once."""
        return self._message is not None and self._message.payloads is not None

    def receive(self, index: int) -> list[tuple[int, ...]]:
        """Returns entry number ``index`` of every rank."""
        assert self._message is not None  # else the schedule has kept the failure to send it
        return [_ENTRY.unpack_from(row, index * _ENTRY.size) for row in self._comm.messages.receive(self._message)]


class Announcement:
    """A buffer of this rank that the others may read once they have the ready message, and ``part`` of theirs."""

    def __init__(
        self, comm: HostMemory, what: Collective, tensor: Tensor, message: _ReadyMessage, part: Tensor
    ) -> None:
        self._comm = comm
        self.schedule = comm.schedule
        self._what = what
        self._nbytes = tensor.nbytes
        self._part = part
        self._start = part.data_ptr() - tensor.data_ptr()  # bytes
        self._message = message
        self._index = len(message.entries)
        self._found: tuple[list[Tensor], list[int]] | None = None

    def wait(self) -> tuple[list[Tensor], list[int]]:
        """Returns the part and the weight of every rank, in rank order.

        Raises:
            CommunicationError: the message failed.
            DivergenceError: a rank has announced another buffer.
        """
        self.schedule.require_working()
        if self._found is not None:  # a published shard is read several times
            return self._found
        if self._message.is_received:  # with another buffer: this rank waits for nobody
            return self._read()
        self._message.require_sent()  # before the wait, because sending is a wait of its own
        with self._comm.waiting(self._what):
            return self._read()

    def _read(self) -> tuple[list[Tensor], list[int]]:
        comm, part, what = self._comm, self._part, self._what
        entries = self._message.receive(self._index)
        tensors = []
        for rank, (other, region, offset, nbytes, _) in enumerate(entries):
            # before the bytes are used: a rank that issued another collective offers another buffer
            if (other, nbytes) != (what.number, self._nbytes):
                with comm.waiting(what):  # which ends the connections
                    raise DivergenceError(
                        f"{what.on(comm.ranks[comm.rank])} is collective number {what.number} here, of {self._nbytes} "
                        f"bytes, and met number {other} of rank {comm.ranks[rank]}, of {nbytes} bytes; the ranks "
                        "issued different collectives"
                    )
            tensors.append(part if rank == comm.rank else comm.memory.read(rank, region, offset + self._start, part))
        self._found = tensors, [weight for *_, weight in entries]
        return self._found


class _Read:
    """A collective whose result this rank computes from what it reads, in the wait; by default nothing."""

    def __init__(self, announcement: Announcement, output: Tensor) -> None:
        self._in_flight: tuple[Announcement, Tensor] | None = announcement, output
        self._schedule = announcement.schedule

    def wait(self) -> None:
        if self._in_flight is None:
            self._schedule.require_working()
            return
        announcement, output = self._in_flight
        tensors, _ = announcement.wait()
        self._in_flight = None  # one that is complete holds no memory
        self._use(tensors, output)

    def _use(self, tensors: list[Tensor], output: Tensor) -> None:
        pass


class _CopyRead(_Read):
    def _use(self, tensors: list[Tensor], output: Tensor) -> None:
        storage = output.untyped_storage().data_ptr()
        if all(tensor.untyped_storage().data_ptr() != storage for tensor in tensors):
            torch.cat(tensors, out=output)  # takes a third of the time of small copies
            return
        for target, source in zip(output.chunk(len(tensors)), tensors, strict=True):
            if target.data_ptr() != source.data_ptr():  # this rank's own shard may lie in the output
                target.copy_(source)


class _SumRead(_Read):
    def __init__(self, announcement: Announcement, output: Tensor, dtype: torch.dtype, gathers: bool) -> None:
        super().__init__(announcement, output)
        self._dtype = dtype
        self._gathers = gathers

    def _use(self, tensors: list[Tensor], output: Tensor) -> None:
        # while the sum is in the cache, into pages of the others that this rank has mapped to read them
        copies = [row for row in tensors if row.data_ptr() != output.data_ptr()] if self._gathers else []
        sum_in_order(output, tensors, self._dtype, copies)


class _PartsRead:
    """An all-to-all in flight: this rank reads its parts of the other ranks' buffers in the wait.

    Args:
        message: collective's number, region, offset, and the elements for each rank.
        parts: of the output, one for each rank.
    """

    def __init__(self, comm: HostMemory, what: Collective, message: Message, parts: Sequence[Tensor]) -> None:
        self._comm = comm
        self._what = what
        self._in_flight: tuple[Message, Sequence[Tensor]] | None = message, parts

    def wait(self) -> None:
        if self._in_flight is None:
            self._comm.schedule.require_working()
            return
        message, parts = self._in_flight
        what, own = self._what, self._comm.rank
        with self._comm.waiting(what):
            payloads = self._comm.messages.receive(message)
            self._in_flight = None
            for rank, (part, payload) in enumerate(zip(parts, payloads, strict=True)):
                number, region, offset, *sizes = struct.unpack(f"<{3 + len(parts)}q", payload)
                if (number, sizes[own]) != (what.number, part.numel()) or min(sizes) < 0:
                    ranks = self._comm.ranks
                    raise DivergenceError(
                        f"{what.on(ranks[own])} is collective number {what.number} here, which expects {part.numel()} "
                        f"elements of rank {ranks[rank]}, and met number {number}, with {sizes[own]}; the ranks issued "
                        "different collectives"
                    )
                if part.numel():
                    start = offset + sum(sizes[:own]) * part.element_size()
                    part.copy_(self._comm.memory.read(rank, region, start, part))
