"""The only file that communicates.

Every collective goes through a :class:`Communicator`, which is passed around as an argument. It folds each call into a
rolling hash of the order of collectives; the vote compares that hash across ranks, because gloo returns wrong sums
silently when two ranks issue equally shaped collectives in a different order.

Sums are formed in FP32 always. ``reduce_scatter_sum`` on gloo is an all-to-all of the slices followed by a local sum in
rank order: half the time of gloo's own reduce-scatter (which blocks its caller and sums in the wire dtype).

CPU ranks of one host read each other's buffers where these come from :meth:`Communicator.allocate`; only the word that
a buffer is ready goes through gloo, in an all-gather of a few integers, which speaks for several buffers where nobody
waits for the first of them yet. So order, failures and time-outs are what they are with sockets, and so are the bits.
The stores of a rank are seen by one that has its word: sending and receiving on a socket are system calls that take
locks, which order memory on x86 and on ARM.

**A buffer may be written again** once every rank has read it. Nobody waits for that by itself; it follows from order:

- compute replicas and unsharded main grads are read by others only up to the end of the call that waits for it, each
  rank votes after that, and writes again after the vote, which no rank leaves before all have joined it;
- a load, too, agrees on a checkpoint before it writes;
- leaves have a rule of their own, in ``sharding.leaves``.
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
_LOG_LENGTH = 4096  # collectives of one step that are remembered by name
_READY_MESSAGE_BYTES = 16 * 2**20  # of buffers that are ready, after which all ranks are told
_READY_MESSAGE_ENTRIES = 16  # buffers in one word
_BLOCK = 1 << 17  # elements that are summed at a time: they stay in a core's cache


class Pending:
    """A collective under way; ``wait`` returns when its result may be read on the current stream."""

    def __init__(self, work: Any = None, *, what: str = "") -> None:
        self._work = work
        self._what = what
        self._steps: deque[Callable[[], Pending | None]] = deque()

    @property
    def is_sent(self) -> bool:
        """Whether ``wait`` would only wait; else it sends something first."""
        return not (isinstance(self._work, _BufferReadyMessage) and self._work.work is None)

    def then(self, step: Callable[[], Pending | None]) -> Pending:
        """This collective, with ``step`` called once it has been waited for; one that ``step`` returns is part of it.

        Where steps start collectives, all ranks wait in one order.
        """
        self._steps.append(step)
        return self

    def proceed(self) -> None:
        """Waits for what is under way, and starts what follows without waiting for it.

        Raises:
            CommunicationError: the collective failed.
        """
        if self._work is not None:
            work, self._work = self._work, None
            with _named_failure(self._what):
                work.wait()
        while self._steps and self._work is None:
            following = self._steps.popleft()()
            if following is not None:
                self._work, self._what = following._work, following._what
                self._steps.extendleft(reversed(following._steps))

    def wait(self) -> None:
        """Waits once; later calls return at once.

        Raises:
            CommunicationError: the collective failed.
        """
        while self._work is not None or self._steps:
            self.proceed()


class _BufferReadyMessage:
    """One all-gather that tells all ranks where buffers lie that are ready; sent when somebody waits for it.

    Args:
        send: starts the all-gather of all that was told until then.
    """

    def __init__(self, send: Callable[[], None]) -> None:
        self._send = send
        self.places: list[tuple[int, int, int, int]] = []  # (number, region, offset, bytes) of each buffer
        self.nbytes = 0
        self.rows: Tensor | None = None  # [world_size, _READY_MESSAGE_ENTRIES, 4] once it is sent
        self.work: Any = None

    def wait(self) -> None:
        """Sends it, if that is not done, and returns when all ranks have sent theirs."""
        if self.work is None:
            self._send()
        if self.work is None:
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
        on_reduction: is shown label and tensor of each exchange, reduce-scatter and all-reduce before it starts.
        may_share: whether :meth:`allocate` still tries shared memory; the same on all ranks.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, *, shared_memory: bool = True
    ) -> None:  # fmt: skip
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
        """A communicator of the same ranks for another thread, whose collectives never meet this one's; all ranks call.

        It goes over gloo and takes CPU tensors, whatever this one does, and waits as long as this one. A process group
        has one, for one thread at a time. It is released with this one: by then its thread must have ended.

        Raises:
            CommunicationError: it could not be made: a rank has died or hangs.
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
        """Lets go of the process group once nothing is under way; its threads end with the last reference to it.

        A thread of gloo that still holds a tensor when the interpreter ends aborts the process. After a failure the
        threads may wait for a rank that never answers, and so would this.
        """
        if self._group is not None and self._group in _siblings:
            _siblings.pop(self._group).release()
        self._group = None
        self._memory = None

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns zeros [numel] to be exchanged, for as long as this object lives; all ranks call in the same order.

        The ranks read it from each other where they can, see :meth:`is_shared`.
        """
        if self.may_share and numel:
            if self._memory is None:
                self._memory = SharedMemory(self.rank, self.exchange_text)
                if not self._memory.refusal:
                    logger.info("the ranks share memory: buffers are read where they lie")
            storage = self._memory.allocate(numel * dtype.itemsize)
            if storage is not None:
                return torch.empty(0, dtype=dtype).set_(storage, 0, (numel,))  # type: ignore[call-overload,no-any-return]
            self.may_share = False
            logger.info(f"buffers travel through sockets, not shared memory: {self._memory.refusal}")
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def is_shared(self, tensor: Tensor) -> bool:
        """Whether the other ranks can read ``tensor`` where it lies; the same on all ranks."""
        return self._memory is not None and self._memory.find(tensor) is not None

    def begin_schedule(self) -> None:
        """Starts the log of collectives of one step; the hash rolls on for the whole run."""
        self.schedule_log.clear()

    def record(self, op: str, label: str, tensor: Tensor) -> str:
        """Puts one collective, its own or a library's, into the schedule that all ranks share; returns its entry."""
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
        """Tells all ranks where ``tensor`` lies; when all have told, ``use`` gets that of every rank, in rank order.

        None where ``tensor`` is no shared memory.
        """
        memory = self._memory
        place = None if memory is None else memory.find(tensor)
        if memory is None or place is None:
            return None
        number, word = self._num_issued, self._ready_message
        index = len(word.places)
        word.places.append((number, *place, tensor.nbytes))
        word.nbytes += tensor.nbytes
        if word.nbytes >= _READY_MESSAGE_BYTES or len(word.places) == _READY_MESSAGE_ENTRIES:
            self.send_ready_message()

        def read() -> None:
            assert word.rows is not None
            tensors = []
            for rank, (other, region, offset, nbytes) in enumerate(word.rows[:, index].tolist()):
                if (other, nbytes) != (number, tensor.nbytes):
                    raise CommunicationError(
                        f"rank {self.rank}: {what} is collective number {number} here, of {tensor.nbytes} bytes, and "
                        f"met number {other} of rank {rank}, of {nbytes} bytes; the ranks issued different collectives"
                    )
                tensors.append(tensor if rank == self.rank else memory.read(rank, region, offset, tensor))
            use(tensors)

        return Pending(word, what=f"rank {self.rank}: {what}").then(read)

    def send_ready_message(self) -> None:
        """Tells the other ranks of the buffers that are ready so far, where they may be read; waits for nobody.

        Whoever waits for such a buffer does it himself; earlier is better where compute comes before. All ranks call it
        at the same place in the order of collectives.
        """
        word = self._ready_message
        if not word.places:
            return
        self._ready_message = _BufferReadyMessage(self.send_ready_message)
        own = torch.zeros(
            _READY_MESSAGE_ENTRIES, 4, dtype=torch.int64
        )  # of one size, so that unequal words are noticed
        own[: len(word.places)] = torch.tensor(word.places, dtype=torch.int64)
        word.rows = torch.empty(self.world_size, *own.shape, dtype=torch.int64)
        what = f"rank {self.rank}: the word that buffers are ready"
        with _named_failure(what):
            word.work = _all_gather_single(word.rows.view(-1), own.view(-1), group=self._group, async_op=True)

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str) -> Pending:
        """Starts gathering ``shard`` [n] of every rank into ``output`` [world_size * n], in rank order.

        ``shard`` may be this rank's slice of ``output``. Only ``shard`` need be shared to be read where it lies.
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
                if target.data_ptr() != source.data_ptr():
                    target.copy_(source)

        return self._share(what, shard, copy) or self._pending(what, _all_gather_single, output, shard)

    def all_to_all_single(
        self, flat: Tensor, take: Callable[[Sequence[Tensor]], None], *, label: str, received: Tensor | None = None
    ) -> Pending:
        """Starts sending slice r of ``flat`` [world_size * n] to rank r.

        Once it has been waited for, ``take`` gets this rank's slice [n] of every rank's ``flat``, in rank order.

        Args:
            flat: shared memory, which is read where it lies, or any other.
            take: uses the slices before it returns.
            label: what this is, for messages.
            received: like ``flat``: where slices that have travelled lie; None makes one where it is needed.
        """
        what = self.record("all_to_all_single", label, flat)
        world_size = self.world_size
        if world_size == 1:
            return Pending().then(lambda: take([flat]))
        shared = self._share(what, flat, lambda flats: take([f.view(world_size, -1)[self.rank] for f in flats]))
        if shared is not None:
            return shared
        arrived = torch.empty_like(flat) if received is None else received
        pending = self._pending(what, dist.all_to_all_single, arrived, flat)
        return pending.then(lambda: take(arrived.view(world_size, -1).unbind()))

    def reduce_scatter_sum(self, output: Tensor, flat: Tensor, *, label: str) -> Pending:
        """Starts summing ``flat`` [world_size * n] over the ranks; ``output`` [n] is this rank's slice. Both FP32.

        ``output`` may be this rank's slice of ``flat``: on shared memory nobody else reads that one.
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
        """Starts summing ``tensor`` [world_size * n] in place over the ranks. FP32.

        On CPU each rank sums its slice, then all gather the slices: all ranks wait for such sums in one order.
        """
        _require_fp32("all_reduce_sum", tensor)
        if self.world_size > 1 and self.device.type == "cpu":
            own = tensor.view(self.world_size, -1)[self.rank]
            summed = self.reduce_scatter_sum(own, tensor, label=label)
            return summed.then(lambda: self.all_gather(tensor, own, label=label))
        what = self.record("all_reduce_sum", label, tensor)
        if self.world_size == 1:
            return Pending()
        return self._pending(what, dist.all_reduce, tensor)

    def all_reduce_max(self, tensor: Tensor, *, label: str) -> Pending:
        """Starts taking the maximum of each element of ``tensor`` in place over the ranks.

        No element may be NaN: a backend may drop it.
        """
        what = self.record("all_reduce_max", label, tensor)
        if self.world_size == 1:
            return Pending()
        return self._pending(what, dist.all_reduce, tensor, dist.ReduceOp.MAX)

    def broadcast(self, tensor: Tensor, *, src: int = 0, label: str) -> None:
        """Overwrites ``tensor`` on every rank with that of rank ``src``; contiguous tensors of any dtype."""
        what = self.record("broadcast", label, tensor)
        if self.world_size > 1 and tensor.numel() > 0:
            self._start(what, dist.broadcast, tensor, group_src=src)

    def gather_rows(self, row: Tensor, *, label: str) -> Tensor:
        """Returns [world_size, n]: the 1-D ``row`` of every rank; for small records.

        gloo blocks until it is there, NCCL only until it is queued on the current stream.
        """
        what = self.record("gather_rows", label, row)
        if self.world_size == 1:
            return row.unsqueeze(0).clone()
        rows = row.new_empty(self.world_size * row.numel())
        self._start(what, _all_gather_single, rows, row.contiguous())
        return rows.view(self.world_size, row.numel())

    def exchange_text(self, text: str) -> list[str]:
        """Returns the text of every rank, in rank order. As padded UTF-8 bytes: nothing is ever pickled."""
        payload = text.encode()
        size = torch.tensor([len(payload)], dtype=torch.int64, device=self.device)
        sizes = self.gather_rows(size, label="text size").flatten().tolist()
        if not max(sizes):
            return [""] * self.world_size
        # no list of Python numbers: another thread may train meanwhile
        padded = torch.from_numpy(np.frombuffer(bytearray(payload.ljust(max(sizes), b"\0")), dtype=np.uint8))
        rows = self.gather_rows(padded.to(self.device), label="text").cpu()
        return [row[:length].numpy().tobytes().decode() for row, length in zip(rows, sizes, strict=True)]

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self.gather_rows(torch.zeros(1, dtype=torch.uint8, device=self.device), label="barrier")


# of each process group; torch keeps a group until all end, so one for each engine would pile up
_siblings: WeakKeyDictionary[dist.ProcessGroup, Communicator] = WeakKeyDictionary()


def _end_siblings() -> None:
    """At the end of the interpreter: a thread of gloo that still holds the last tensor of a save would abort it.

    A script that made the process group itself may leave it as it is; this one it does not know. After an uncaught
    exception the other ranks may never answer.
    """
    atexit.unregister(_end_siblings)
    while _siblings and not hasattr(sys, "last_value"):
        _, sibling = _siblings.popitem()
        group, sibling._group = sibling._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


@contextmanager
def _named_failure(what: str) -> Iterator[None]:
    """Says which collective failed: the backends name an address at best."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # of this rank alone, and it says so itself
    except RuntimeError as error:
        raise CommunicationError(
            f"{what} failed: another rank has died, hangs, or issued other collectives; the first error of the other "
            f"ranks says why ({str(error).splitlines()[0][:200]})"
        ) from error


def _sum_in_order(output: Tensor, rows: Sequence[Tensor]) -> None:
    """``output`` [n] becomes the sum of two or more ``rows`` [n], from left to right; it may be one of them."""
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
