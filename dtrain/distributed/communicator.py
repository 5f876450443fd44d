"""The only module that communicates.

Every collective goes through a :class:`Communicator`, which is passed as an argument. Each call is folded into a
rolling hash of the order of collectives. The vote compares that hash across ranks, because gloo returns wrong sums
silently if two ranks issue equally shaped collectives in a different order.

Sums are FP32 always. ``reduce_scatter_sum`` on gloo is an all-to-all of the shards and a local sum in rank order: that
takes half the time of gloo's own reduce-scatter, which blocks its caller and sums in the dtype of its input.

CPU ranks of one host read each other's buffers if these come from :meth:`Communicator.allocate`. Only a ready message
goes through gloo: one small all-gather, batched over all buffers announced before the first wait. So order, failures,
time-outs and bits are the same as with sockets. A rank that has received a ready message sees the sender's stores,
because sending and receiving on a socket are system calls that take locks, which order memory on x86 and on ARM.

[Note: buffer reuse] A buffer that other ranks read may be written again only after all of them have read it. No rank
waits for that explicitly; it follows from the order of events:

- Compute replicas, masters that serve as replicas, and unsharded main grads are read during the ``wait`` of a
  collective. Every rank has left its waits before it votes, and these buffers are written only after the vote, which no
  rank leaves before all have joined it. So a collective on such a buffer must be waited for before the next vote, even
  if no rank needs its result.
- A load writes masters, and the replicas after them. It agrees on a checkpoint first, which has the same effect.
- Unreduced gradients are written several times between two votes. They follow [Note: ring buffer reuse] in
  ``sharding.ring_buffer``.

[Note: streams] On a GPU a collective that returns a :class:`Pending` runs on NCCL's own stream, any other (a broadcast,
``gather_rows``) on the current stream. The host waits for neither; an engine does all its work on the current stream.

- NCCL's stream begins a collective after all that was queued on the current stream when it was issued. So its output
  may be new memory whose last owner has freed it, while the kernels of that owner are still queued.
- ``Pending.wait`` makes the current stream wait for that one collective. What is queued later may read its result,
  write its input, and free both.
- Until the wait torch's handle holds input and output, so their memory is not reused even if all references here are
  dropped. No tensor needs ``record_stream``. (Before torch 2.8 this took ``TORCH_NCCL_AVOID_RECORD_STREAMS``.)
"""

from __future__ import annotations

import atexit
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.distributed.host_memory import SharedMemory
from dtrain.distributed.logging import logger
from dtrain.errors import CommunicationError

# torch 2.13 renames the two; dtrain supports torch from 2.11 on.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_HASH_MULTIPLIER = 1099511628211  # the 64-bit FNV prime
_HASH_MASK = (1 << 63) - 1  # stays a non-negative int64
_LOG_LENGTH = 4096  # collectives of one step that are kept by name
_READY_MESSAGE_BYTES = 16 * 2**20  # bytes of announced buffers after which the message is sent
_READY_MESSAGE_ENTRIES = 16  # buffers in one message
_BLOCK = 1 << 17  # elements that are summed at a time: they stay in a core's cache


class Pending:
    """A collective in flight; ``wait`` returns when its result may be read on the current stream."""

    def __init__(self, work: Any = None, *, what: str = "") -> None:
        self._work = work
        self._what = what
        self._steps: deque[Callable[[], Pending | None]] = deque()

    @property
    def is_sent(self) -> bool:
        """Whether ``wait`` would send nothing first."""
        return not (isinstance(self._work, _BufferReadyMessage) and self._work.work is None)

    def then(self, step: Callable[[], Pending | None]) -> Pending:
        """Adds ``step``, which is called after the wait; a collective that it returns is waited for too.

        If steps start collectives, all ranks must wait in one order: [Note: order of waits] in ``sharding.reduce``.
        """
        self._steps.append(step)
        return self

    def proceed(self) -> None:
        """Waits for the collective in flight, and starts the next one without waiting for it.

        Raises:
            CommunicationError: the collective failed.
        """
        if self._work is not None:
            work, self._work = self._work, None  # before the wait: a collective that failed is not waited for again
            with _named_failure(self._what):
                work.wait()
        while self._steps and self._work is None:
            following = self._steps.popleft()()
            if following is not None:
                self._work, self._what = following._work, following._what
                # its own steps come before those that wait for it
                self._steps.extendleft(reversed(following._steps))

    def wait(self) -> None:
        """Waits once; later calls return at once.

        Raises:
            CommunicationError: the collective failed.
        """
        while self._work is not None or self._steps:
            self.proceed()


class _BufferReadyMessage:
    """One all-gather of the locations of buffers that are ready; sent when a rank waits for one of them, or earlier."""

    def __init__(self, send: Callable[[], None]) -> None:
        self._send = send
        self.entries: list[tuple[int, int, int, int]] = []  # (number, region, offset, bytes) of each buffer
        self.nbytes = 0
        self.rows: Tensor | None = None  # [world_size, _READY_MESSAGE_ENTRIES, 4] once it is sent
        self.work: Any = None

    def wait(self) -> None:
        if self.work is None:
            self._send()
        if self.work is None:  # the communicator has dropped this message, so another send would be empty
            raise RuntimeError("an earlier attempt to send it failed")
        self.work.wait()


_REDUCTIONS = ("all_to_all_single", "reduce_scatter_sum", "all_reduce_sum")


class Communicator:
    """Collectives over one process group, or over a single rank without one.

    Args:
        group: the process group, or None for a world of one rank, which opens no socket.
        device: where the tensors of the collectives live.
        shared_memory: let CPU ranks of one host read each other's buffers.

    Attributes:
        on_reduction: called with label and tensor of each all-to-all, reduce-scatter and all-reduce before it starts.
        may_share: whether :meth:`allocate` still tries shared memory; the same on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, *, shared_memory: bool = True) -> None:
        self._group = group
        self.device = device
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world_size = dist.get_world_size(group) if group is not None else 1
        self.schedule_hash = 0
        self.schedule_log: list[str] = []
        self._num_issued = 0
        self.on_reduction: Callable[[str, Tensor], None] | None = None
        self.may_share = shared_memory and device.type == "cpu" and self.world_size > 1
        self._memory: SharedMemory | None = None
        self._ready_message = _BufferReadyMessage(self.send_ready_message)

    def sibling(self) -> Communicator:
        """Returns a communicator of the same ranks for another thread, with a process group of its own; all ranks call.

        It always goes over gloo and takes CPU tensors; its time-out is this one's. A process group has one sibling, for
        one thread at a time. It is released with this one; its thread must have ended by then.

        Raises:
            CommunicationError: it could not be made, because a rank has died or hangs.
        """
        if self._group is None:
            return Communicator(None, torch.device("cpu"))
        if self._group not in _siblings:
            timeout = self._group._get_backend(self.device).options._timeout
            with _named_failure(f"rank {self.rank}: a second process group"):
                group = dist.new_group(dist.get_process_group_ranks(self._group), timeout=timeout, backend="gloo")
            if not _siblings:
                atexit.register(_end_siblings)
            _siblings[self._group] = Communicator(group, torch.device("cpu"), shared_memory=False)
        return _siblings[self._group]

    def release(self) -> None:
        """Drops the process group, whose threads end with the last reference to it; nothing may be in flight.

        A gloo thread that still holds a tensor when the interpreter ends aborts the process. Not to be called after a
        failure: the threads may wait for a rank that never answers.
        """
        if self._group is not None and self._group in _siblings:
            _siblings.pop(self._group).release()
        self._group = None
        self._memory = None

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns zeros [numel] that live as long as this object; all ranks call in the same order.

        The other ranks can read the tensor directly if :meth:`is_shared`; see [Note: buffer reuse].
        """
        if self.may_share and numel:
            if self._memory is None:
                self._memory = SharedMemory(self.rank, self.exchange_text)
                if not self._memory.unsupported_reason:
                    logger.info("the ranks share memory: buffers are read in place")
            storage = self._memory.allocate(numel * dtype.itemsize)
            if storage is not None:
                return torch.empty(0, dtype=dtype).set_(storage, 0, (numel,))  # type: ignore[call-overload,no-any-return]
            self.may_share = False  # on all ranks: a failure of one is a failure of all
            logger.info(f"buffers are sent through sockets, not shared memory: {self._memory.unsupported_reason}")
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def is_shared(self, tensor: Tensor) -> bool:
        """Whether the other ranks can read ``tensor`` in place; the same on all ranks."""
        return self._memory is not None and self._memory.find(tensor) is not None

    def begin_schedule(self) -> None:
        """Starts the log of one step; the hash covers the whole run."""
        self.schedule_log.clear()

    def record(self, op: str, label: str, tensor: Tensor) -> str:
        """Adds a collective, dtrain's or a library's, to the schedule that the vote compares; returns its entry."""
        # sizes and labels only: reading values would wait for the device
        entry = f"{op}({label}, {tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')})"
        if len(self.schedule_log) < _LOG_LENGTH:
            self.schedule_log.append(entry)
        self._num_issued += 1
        self.schedule_hash = (self.schedule_hash * _HASH_MULTIPLIER ^ zlib.crc32(entry.encode())) & _HASH_MASK
        if self.on_reduction is not None and op in _REDUCTIONS:
            self.on_reduction(label, tensor)
        return entry

    def _start(self, what: str, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.send_ready_message()  # before anything else: backends match collectives by their order
        with _named_failure(f"rank {self.rank}: {what}"):
            return collective(*args, group=self._group, **kwargs)

    def _pending(self, what: str, collective: Callable[..., Any], *args: Any) -> Pending:
        work = self._start(what, collective, *args, async_op=True)
        return Pending(work, what=f"rank {self.rank}: {what}")

    def _share(self, what: str, tensor: Tensor, use: Callable[[list[Tensor]], None]) -> Pending | None:
        """Announces ``tensor``; after the wait, ``use`` gets that of every rank, in rank order.

        Returns None if ``tensor`` is not shared memory.
        """
        memory = self._memory
        location = None if memory is None else memory.find(tensor)
        if memory is None or location is None:
            return None
        number, message = self._num_issued, self._ready_message
        index = len(message.entries)
        message.entries.append((number, *location, tensor.nbytes))
        message.nbytes += tensor.nbytes
        # by the sizes alone, which are equal on all ranks, so that all send at the same point
        if message.nbytes >= _READY_MESSAGE_BYTES or len(message.entries) == _READY_MESSAGE_ENTRIES:
            self.send_ready_message()

        def read() -> None:
            assert message.rows is not None
            tensors = []
            for rank, (other, region, offset, nbytes) in enumerate(message.rows[:, index].tolist()):
                # before the bytes are used: a rank that issued another collective offers another buffer
                if (other, nbytes) != (number, tensor.nbytes):
                    raise CommunicationError(
                        f"rank {self.rank}: {what} is collective number {number} here, of {tensor.nbytes} bytes, and "
                        f"met number {other} of rank {rank}, of {nbytes} bytes; the ranks issued different collectives"
                    )
                tensors.append(tensor if rank == self.rank else memory.read(rank, region, offset, tensor))
            use(tensors)

        return Pending(message, what=f"rank {self.rank}: {what}").then(read)

    def send_ready_message(self) -> None:
        """Announces the buffers that are ready so far to the other ranks, without waiting.

        A wait for such a buffer sends the message too; earlier is better if this rank computes before it waits. All
        ranks call this at the same point in the order of collectives.
        """
        message = self._ready_message
        if not message.entries:
            return
        # first: a failure below must not leave the next buffers in a message that is never sent
        self._ready_message = _BufferReadyMessage(self.send_ready_message)
        # of a fixed size, so that messages with unequal numbers of entries are noticed
        row = torch.zeros(_READY_MESSAGE_ENTRIES, 4, dtype=torch.int64)
        row[: len(message.entries)] = torch.tensor(message.entries, dtype=torch.int64)
        message.rows = torch.empty(self.world_size, *row.shape, dtype=torch.int64)
        with _named_failure(f"rank {self.rank}: the message that buffers are ready"):
            message.work = _all_gather_single(message.rows.view(-1), row.view(-1), group=self._group, async_op=True)

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str) -> Pending:
        """Starts the all-gather of ``shard`` [n] into ``output`` [world_size * n], in rank order.

        ``shard`` may be this rank's slice of ``output``. It is read in place if it is shared; ``output`` need not be.
        """
        what = self.record("all_gather", label, output)
        if output.dtype.itemsize == 1:  # not every backend knows every FP8 format
            output, shard = output.view(torch.uint8), shard.view(torch.uint8)
        if self.world_size == 1:
            if output.data_ptr() != shard.data_ptr():
                output.copy_(shard)
            return Pending()

        def copy(shards: list[Tensor]) -> None:
            for target, source in zip(output.view(self.world_size, -1), shards, strict=True):
                if target.data_ptr() != source.data_ptr():  # this rank's own shard may lie in the output
                    target.copy_(source)

        return self._share(what, shard, copy) or self._pending(what, _all_gather_single, output, shard)

    def all_to_all_single(
        self, flat: Tensor, consume: Callable[[Sequence[Tensor]], None], *, label: str, received: Tensor | None = None
    ) -> Pending:
        """Starts sending shard r of ``flat`` [world_size * n] to rank r.

        Args:
            flat: shared memory, which is read in place, or any other.
            consume: called after the wait with this rank's shard [n] of every rank's ``flat``, in rank order; must use
                the shards before it returns.
            label: name in messages.
            received: buffer like ``flat`` for shards that were sent through sockets; None allocates one if needed.
        """
        what = self.record("all_to_all_single", label, flat)
        world_size = self.world_size
        if world_size == 1:  # consumed at the wait, as with several ranks
            return Pending().then(lambda: consume([flat]))
        shared = self._share(what, flat, lambda flats: consume([f.view(world_size, -1)[self.rank] for f in flats]))
        if shared is not None:
            return shared
        arrived = torch.empty_like(flat) if received is None else received
        pending = self._pending(what, dist.all_to_all_single, arrived, flat)
        return pending.then(lambda: consume(arrived.view(world_size, -1).unbind()))

    def reduce_scatter_sum(self, output: Tensor, flat: Tensor, *, label: str) -> Pending:
        """Starts the sum of ``flat`` [world_size * n] over the ranks; ``output`` [n] is this rank's shard. Both FP32.

        ``output`` may be this rank's slice of ``flat``, because no other rank reads that slice.
        """
        _require_fp32("reduce_scatter_sum", flat)
        if self.world_size > 1 and self.device.type == "cpu":
            return self.all_to_all_single(flat, lambda rows: _sum_in_order(output, rows), label=label)
        what = self.record("reduce_scatter_sum", label, flat)
        if self.world_size == 1:
            if output.data_ptr() != flat.data_ptr():
                output.copy_(flat)
            return Pending()
        return self._pending(what, _reduce_scatter_single, output, flat)

    def all_reduce_sum(self, tensor: Tensor, *, label: str) -> Pending:
        """Starts the sum of ``tensor`` [world_size * n] FP32 over the ranks, in place.

        On CPU this is a reduce-scatter, then an all-gather: all ranks must wait for such sums in one order.
        """
        _require_fp32("all_reduce_sum", tensor)
        if self.world_size > 1 and self.device.type == "cpu":
            shard = tensor.view(self.world_size, -1)[self.rank]
            summed = self.reduce_scatter_sum(shard, tensor, label=label)
            return summed.then(lambda: self.all_gather(tensor, shard, label=label))
        what = self.record("all_reduce_sum", label, tensor)
        if self.world_size == 1:
            return Pending()
        return self._pending(what, dist.all_reduce, tensor)

    def all_reduce_max(self, tensor: Tensor, *, label: str) -> Pending:
        """Starts the maximum of each element of ``tensor`` over the ranks, in place.

        No element may be NaN: a backend may drop it.
        """
        what = self.record("all_reduce_max", label, tensor)
        if self.world_size == 1:
            return Pending()
        return self._pending(what, dist.all_reduce, tensor, dist.ReduceOp.MAX)

    def broadcast(self, tensor: Tensor, *, src: int = 0, label: str) -> None:
        """Overwrites ``tensor`` (contiguous, any dtype) on every rank with that of rank ``src``."""
        what = self.record("broadcast", label, tensor)
        if self.world_size > 1 and tensor.numel() > 0:
            self._start(what, dist.broadcast, tensor, group_src=src)

    def gather_rows(self, row: Tensor, *, label: str) -> Tensor:
        """Returns [world_size, n]: the 1-D ``row`` of every rank; for small records. A single rank's is a view.

        gloo blocks until the rows have arrived, NCCL only until the collective is queued on the current stream.
        """
        what = self.record("gather_rows", label, row)
        if self.world_size == 1:
            return row.unsqueeze(0)
        rows = row.new_empty(self.world_size * row.numel())
        self._start(what, _all_gather_single, rows, row.contiguous())
        return rows.view(self.world_size, row.numel())

    def exchange_text(self, text: str) -> list[str]:
        """Returns the text of every rank, in rank order; it is sent as padded UTF-8 bytes, never pickled.

        The host waits for the device, except on a single rank.
        """
        if self.world_size == 1:
            return [text]
        payload = text.encode()
        size = torch.tensor([len(payload)], dtype=torch.int64, device=self.device)
        sizes = self.gather_rows(size, label="text size").flatten().tolist()
        if not max(sizes):  # a gather of no bytes would be a collective for nothing
            return [""] * self.world_size
        # without a list of Python numbers, which would hold the GIL while another thread trains
        padded = torch.from_numpy(np.frombuffer(bytearray(payload.ljust(max(sizes), b"\0")), dtype=np.uint8))
        rows = self.gather_rows(padded.to(self.device), label="text").cpu()
        return [row[:length].numpy().tobytes().decode() for row, length in zip(rows, sizes, strict=True)]

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        # read, because NCCL alone would not stop the host
        self.gather_rows(torch.zeros(1, dtype=torch.uint8, device=self.device), label="barrier").cpu()


# by process group; torch keeps a group until all end, so one for each engine would pile up
_siblings: WeakKeyDictionary[dist.ProcessGroup, Communicator] = WeakKeyDictionary()


def _end_siblings() -> None:
    """Destroys the siblings at exit: a gloo thread that holds the last tensor of a save would abort the interpreter.

    A script that made the process group itself does not know of these. After an uncaught exception they stay, because
    the other ranks may never answer; ``setup`` waits for their threads.
    """
    atexit.unregister(_end_siblings)
    while _siblings and not hasattr(sys, "last_value"):
        _, sibling = _siblings.popitem()
        group, sibling._group = sibling._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


@contextmanager
def _named_failure(what: str) -> Iterator[None]:
    """Names the collective that failed; the backends name an address at best."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # a failure of this rank alone, with a message of its own; a kernel's shows up in any later call
    except RuntimeError as error:
        raise CommunicationError(
            f"{what} failed: another rank has died, hangs, or issued other collectives; the first error of the other "
            f"ranks says why ({str(error).splitlines()[0][:200]})"
        ) from error


def _sum_in_order(output: Tensor, rows: Sequence[Tensor]) -> None:
    """Writes the sum of two or more ``rows`` [n], from left to right, to ``output`` [n], which may be one of them."""
    first, *middle, last = rows
    scratch = torch.empty(min(_BLOCK, output.numel()), dtype=output.dtype)
    for start in range(0, output.numel(), _BLOCK):
        block = slice(start, start + _BLOCK)
        total = first[block]
        for row in middle:
            total = torch.add(total, row[block], out=scratch[: total.numel()])
        torch.add(total, last[block], out=output[block])


def _require_fp32(op: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.float32:
        raise TypeError(f"{op} forms partial sums, so it takes float32 tensors; got {tensor.dtype}")
