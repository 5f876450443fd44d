"""Collectives of CPU ranks of one host, which read each other's buffers.

Buffers from :meth:`HostMemory.allocate` are read in place. Only a ready message is sent, through pipes: one for all
buffers announced before the first wait. Small rows go through the pipes too, all else through the process group; order,
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
    CollectiveSchedule,
    GradientExchange,
    GradientSend,
    Handle,
    byte_view,
    recorded,
    require_fp32,
)
from dtrain.distributed.gradient_buffers import MAX_BYTES_IN_FLIGHT
from dtrain.distributed.logging import logger
from dtrain.distributed.pipes import MAX_PAYLOAD_BYTES, Message, Pipes
from dtrain.distributed.process_group import ProcessGroup, named_failure, sum_in_order
from dtrain.distributed.ring import RingSchedule
from dtrain.distributed.ring_exchange import RingExchange
from dtrain.distributed.shared_memory import SharedMemory
from dtrain.errors import CommunicationError

_READY_MESSAGE_BYTES = 16 * 2**20  # bytes of announced buffers after which the message is sent
_READY_MESSAGE_ENTRIES = 16  # buffers in one message
_ENTRY = struct.Struct("<5q")  # number of the collective, region, offset, bytes, weight of a buffer
_ALIGNMENT = 64  # bytes; of the slots of the ring


class HostMemory(ProcessGroup):
    """Collectives over ``group``, whose ranks are CPU ranks of one host.

    Args:
        group: two or more ranks.
        device: the CPU.
        schedule: shared with the communicators of other axes; None: a new one.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, schedule: CollectiveSchedule | None = None
    ) -> None:
        super().__init__(group, device, schedule)
        self._ready_message = _ReadyMessage(self)
        self.pipes = Pipes(self.rank, self.world_size, group._get_backend(device).options._timeout)
        self.pipes.open(self.exchange_text)
        self.memory = SharedMemory(self.rank, self.exchange_text)
        self.memory.unsupported_reason = self.pipes.unsupported_reason  # shared buffers need ready messages
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
        if not self.is_shared(shard):
            return super().all_gather(output, shard, label=label)
        what = self.schedule.record("all_gather", label, output)
        shard = byte_view(shard)
        if _extent(shard) in self._written:  # only to know that the other ranks have written theirs
            self._written.discard(_extent(shard))
            return _Read(self.announce(what, shard), output)
        announcement = self._published.get(_extent(shard)) or self.announce(what, shard)
        return _CopyRead(announcement, byte_view(output))

    def publish(self, shards: Sequence[Tensor]) -> None:
        shared = [shard for shard in map(byte_view, shards) if self.is_shared(shard)]
        self._published = {_extent(shard): self.announce("publish", shard) for shard in shared}
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
        return _SumRead(self.announce(what, flat), output, self.rank, dtype, gathers)

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
        entry = struct.pack(f"<{3 + self.world_size}q", self.schedule.num_issued, *location, *input_sizes)
        with named_failure(f"rank {self.rank}: {what}"):
            message = self.pipes.send("all-to-all", entry)
        return _PartsRead(self, what, message, output.split(list(output_sizes)))

    def gather_rows(self, row: Tensor, *, label: str) -> Tensor:
        if self.pipes.unsupported_reason or not 0 < row.nbytes <= MAX_PAYLOAD_BYTES:
            return super().gather_rows(row, label=label)
        what = self.schedule.record("gather_rows", label, row)
        self.flush()
        payload = row.detach().contiguous().view(torch.uint8).numpy().tobytes()
        with named_failure(f"rank {self.rank}: {what}"):
            payloads = self.pipes.receive(self.pipes.send("gather_rows", payload))
        return torch.frombuffer(bytearray().join(payloads), dtype=row.dtype).view(self.world_size, row.numel())

    def gradient_exchange(self, sends: Sequence[GradientSend], num_early: int) -> GradientExchange:
        if sends:
            sizes = [-(-send.nbytes // _ALIGNMENT) * _ALIGNMENT for send in sends]
            schedule = RingSchedule(sizes, num_early, MAX_BYTES_IN_FLIGHT)
            memory = self.allocate(schedule.capacity, torch.uint8)
            if self.is_shared(memory):  # else the allocation failed on some rank, and is private on all
                return RingExchange(self, sends, memory, schedule)
        return super().gradient_exchange(sends, num_early)

    def release(self) -> None:
        super().release()
        self._published.clear()
        self.memory.release()
        self.pipes.release()

    def announce(self, what: str, tensor: Tensor, weight: int = 0) -> Announcement:
        """Announces ``tensor``, which is shared, to the other ranks; all ranks announce in one order."""
        location = self.memory.find(tensor)
        assert location is not None
        message = self._ready_message
        announcement = Announcement(self, what, self.schedule.num_issued, tensor, message)
        message.entries.append(_ENTRY.pack(announcement.collective, *location, tensor.nbytes, weight))
        message.nbytes += tensor.nbytes
        # by the sizes alone, which are equal on all ranks, so that all send at the same point
        if message.nbytes >= _READY_MESSAGE_BYTES or len(message.entries) == _READY_MESSAGE_ENTRIES:
            self.flush()
        return announcement

    def flush(self) -> None:
        message = self._ready_message
        if message.entries:
            # first: a failure below must not leave the next buffers in a message that is never sent
            self._ready_message = _ReadyMessage(self)
            message.send()


def _extent(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes


class _ReadyMessage:
    """The locations of buffers that are ready; sent when a rank waits for one of them, or earlier."""

    def __init__(self, comm: HostMemory) -> None:
        self._comm = comm
        self.entries: list[bytes] = []
        self.nbytes = 0
        self._message: Message | None = None  # once it is sent

    def send(self) -> None:
        with named_failure(f"rank {self._comm.rank}: the message that buffers are ready"):
            self._message = self._comm.pipes.send("ready message", b"".join(self.entries))

    def wait(self, index: int) -> list[tuple[int, ...]]:
        """Returns entry number ``index`` of every rank."""
        if self._message is None:
            self._comm.flush()
        if self._message is None:  # the communicator has dropped this message, so another send would be empty
            raise RuntimeError("an earlier attempt to send it failed")
        return [_ENTRY.unpack_from(row, index * _ENTRY.size) for row in self._comm.pipes.receive(self._message)]


class Announcement:
    """A buffer of this rank that the others may read once they have the ready message, and theirs.

    Attributes:
        collective: number of the collective in the schedule.
    """

    def __init__(self, comm: HostMemory, what: str, collective: int, tensor: Tensor, message: _ReadyMessage) -> None:
        self._comm = comm
        self._what = f"rank {comm.rank}: {what}"
        self.collective = collective
        self._tensor = tensor
        self._message = message
        self._index = len(message.entries)

    def wait(self) -> tuple[list[Tensor], list[int]]:
        """Returns the buffer and the weight of every rank, in rank order.

        Raises:
            CommunicationError: the message failed, or a rank has announced another buffer.
        """
        with named_failure(self._what):
            entries = self._message.wait(self._index)
        comm, tensor = self._comm, self._tensor
        tensors = []
        for rank, (other, region, offset, nbytes, _) in enumerate(entries):
            # before the bytes are used: a rank that issued another collective offers another buffer
            if (other, nbytes) != (self.collective, tensor.nbytes):
                raise CommunicationError(
                    f"{self._what} is collective number {self.collective} here, of {tensor.nbytes} bytes, and met "
                    f"number {other} of rank {rank}, of {nbytes} bytes; the ranks issued different collectives"
                )
            tensors.append(tensor if rank == comm.rank else comm.memory.read(rank, region, offset, tensor))
        return tensors, [weight for *_, weight in entries]


class _Read:
    """A collective whose result this rank computes from what it reads, in the wait; by default nothing."""

    def __init__(self, announcement: Announcement, output: Tensor) -> None:
        self._in_flight: tuple[Announcement, Tensor] | None = announcement, output

    def wait(self) -> None:
        # before the wait: a collective that failed is not waited for again, and one that is complete holds no memory
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            announcement, output = in_flight
            self._use(announcement.wait()[0], output)

    def _use(self, tensors: list[Tensor], output: Tensor) -> None:
        pass


class _CopyRead(_Read):
    def _use(self, tensors: list[Tensor], output: Tensor) -> None:
        for target, source in zip(output.view(len(tensors), -1), tensors, strict=True):
            if target.data_ptr() != source.data_ptr():  # this rank's own shard may lie in the output
                target.copy_(source)


class _SumRead(_Read):
    def __init__(
        self, announcement: Announcement, output: Tensor, rank: int, dtype: torch.dtype, gathers: bool
    ) -> None:
        super().__init__(announcement, output)
        self._rank = rank
        self._dtype = dtype
        self._gathers = gathers

    def _use(self, tensors: list[Tensor], output: Tensor) -> None:
        rows = [tensor.view(len(tensors), -1)[self._rank] for tensor in tensors]
        # while the sum is in the cache, into pages of the others that this rank has mapped to read them
        copies = [row for row in rows if row.data_ptr() != output.data_ptr()] if self._gathers else []
        sum_in_order(output, rows, self._dtype, copies)


class _PartsRead:
    """An all-to-all in flight: this rank reads its parts of the other ranks' buffers in the wait.

    Args:
        message: collective's number, region, offset, and the elements for each rank.
        parts: of the output, one for each rank.
    """

    def __init__(self, comm: HostMemory, what: str, message: Message, parts: Sequence[Tensor]) -> None:
        self._comm = comm
        self._what = f"rank {comm.rank}: {what}"
        self._in_flight: tuple[Message, Sequence[Tensor]] | None = message, parts

    def wait(self) -> None:
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            return
        message, parts = in_flight
        with named_failure(self._what):
            payloads = self._comm.pipes.receive(message)
        own = struct.unpack_from("<q", message.payload)[0]
        for rank, (part, payload) in enumerate(zip(parts, payloads, strict=True)):
            number, region, offset, *sizes = struct.unpack(f"<{3 + len(parts)}q", payload)
            if (number, sizes[self._comm.rank]) != (own, part.numel()):
                raise CommunicationError(
                    f"{self._what} is collective number {own} here, which expects {part.numel()} elements of rank "
                    f"{rank}, and met number {number}, with {sizes[self._comm.rank]}; the ranks issued different "
                    f"collectives"
                )
            if part.numel():
                start = offset + sum(sizes[: self._comm.rank]) * part.element_size()
                part.copy_(self._comm.memory.read(rank, region, start, part))
