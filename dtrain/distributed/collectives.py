"""The only file that communicates.

Every collective goes through a :class:`Communicator`, which is passed around as an argument. It folds each call into a
rolling hash of the order of collectives; the vote compares that hash across ranks, because gloo returns wrong sums
silently when two ranks issue equally shaped collectives in a different order.

Sums are formed in FP32 always. ``reduce_scatter_sum`` on gloo is an all-to-all of the slices followed by a local sum in
rank order: half the time of gloo's own reduce-scatter (which blocks its caller and sums in the wire dtype).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.errors import CommunicationError

# torch 2.13 renames the two; dtrain supports torch from 2.11 on.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_HASH_MULTIPLIER = 1099511628211  # the 64-bit FNV prime
_HASH_MASK = (1 << 63) - 1  # stays a non-negative int64
_LOG_LENGTH = 4096  # collectives of one step that are remembered by name


class Pending:
    """A collective under way; ``wait`` returns when its result may be read on the current stream."""

    def __init__(self, work: Any = None, *, what: str = "") -> None:
        self._work = work
        self._what = what
        self._finish: Callable[[], None] | None = None

    def then(self, finish: Callable[[], None]) -> Pending:
        """This collective, with ``finish`` called once it has been waited for."""
        earlier = self._finish

        def both() -> None:
            if earlier is not None:
                earlier()
            finish()

        self._finish = both
        return self

    def is_done(self) -> bool:
        """Whether ``wait`` would not block."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> None:
        """Waits once; later calls return at once.

        Raises:
            CommunicationError: the collective failed.
        """
        if self._work is not None:
            work, self._work = self._work, None
            with _named_failure(self._what):
                work.wait()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()


class Communicator:
    """Collectives over one process group, or over a single rank without one.

    Args:
        group: the process group, or None for a world of one rank, which opens no socket.
        device: where the tensors of the collectives live.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self.device = device
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world_size = dist.get_world_size(group) if group is not None else 1
        self.schedule_hash = 0
        self.schedule_log: list[str] = []

    def release(self) -> None:
        """Lets go of the process group once nothing is under way; its threads end with the last reference to it.

        A thread of gloo that still holds a tensor when the interpreter ends aborts the process. After a failure the
        threads may wait for a rank that never answers, and so would this.
        """
        self._group = None

    def begin_schedule(self) -> None:
        """Starts the log of collectives of one step; the hash rolls on for the whole run."""
        self.schedule_log.clear()

    def _record(self, op: str, label: str, tensor: Tensor) -> str:
        entry = f"{op}({label}, {tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')})"
        if len(self.schedule_log) < _LOG_LENGTH:
            self.schedule_log.append(entry)
        self.schedule_hash = (self.schedule_hash * _HASH_MULTIPLIER ^ zlib.crc32(entry.encode())) & _HASH_MASK
        return entry

    def _start(self, what: str, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _named_failure(f"rank {self.rank}: {what}"):
            return collective(*args, group=self._group, **kwargs)

    def _pending(self, what: str, collective: Callable[..., Any], *args: Any) -> Pending:
        work = self._start(what, collective, *args, async_op=True)
        return Pending(work, what=f"rank {self.rank}: {what}")

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str) -> Pending:
        """Starts gathering ``shard`` [n] of every rank into ``output`` [world_size * n], in rank order.

        ``shard`` may be this rank's slice of ``output``.
        """
        what = self._record("all_gather", label, output)
        if self.world_size == 1:
            if output.data_ptr() != shard.data_ptr():
                output.copy_(shard)
            return Pending()
        return self._pending(what, _all_gather_single, output, shard)

    def exchange_slices(self, output: Tensor, flat: Tensor, *, label: str) -> Pending:
        """Starts sending slice r of ``flat`` [world_size * n] to rank r; row r of ``output`` comes from rank r."""
        what = self._record("exchange_slices", label, flat)
        if self.world_size == 1:
            output.view(-1).copy_(flat)
            return Pending()
        return self._pending(what, dist.all_to_all_single, output.view(-1), flat)

    def reduce_scatter_sum(self, output: Tensor, flat: Tensor, *, label: str) -> Pending:
        """Starts summing ``flat`` [world_size * n] over the ranks; ``output`` [n] is this rank's slice. Both FP32."""
        _require_fp32("reduce_scatter_sum", flat)
        what = self._record("reduce_scatter_sum", label, flat)
        if self.world_size == 1:
            if output.data_ptr() != flat.data_ptr():
                output.copy_(flat)
            return Pending()
        if self.device.type != "cpu":
            return self._pending(what, _reduce_scatter_single, output, flat)
        received = torch.empty_like(flat)

        def sum_in_rank_order() -> None:
            rows = received.view(self.world_size, -1)
            output.copy_(rows[0])
            for row in rows[1:]:
                output.add_(row)

        return self._pending(what, dist.all_to_all_single, received, flat).then(sum_in_rank_order)

    def all_reduce_sum(self, tensor: Tensor, *, label: str) -> Pending:
        """Starts summing ``tensor`` in place over the ranks. FP32."""
        _require_fp32("all_reduce_sum", tensor)
        what = self._record("all_reduce_sum", label, tensor)
        if self.world_size == 1:
            return Pending()
        return self._pending(what, dist.all_reduce, tensor)

    def broadcast(self, tensor: Tensor, *, src: int = 0, label: str) -> None:
        """Overwrites ``tensor`` on every rank with that of rank ``src``; contiguous tensors of any dtype."""
        what = self._record("broadcast", label, tensor)
        if self.world_size > 1 and tensor.numel() > 0:
            self._start(what, dist.broadcast, tensor, group_src=src)

    def gather_rows(self, row: Tensor, *, label: str) -> Tensor:
        """Returns [world_size, n]: the 1-D ``row`` of every rank; for small records.

        gloo blocks until it is there, NCCL only until it is queued on the current stream.
        """
        what = self._record("gather_rows", label, row)
        if self.world_size == 1:
            return row.unsqueeze(0).clone()
        rows = row.new_empty(self.world_size * row.numel())
        self._start(what, _all_gather_single, rows, row.contiguous())
        return rows.view(self.world_size, row.numel())

    def exchange_text(self, text: str) -> list[str]:
        """Returns the text of every rank, in rank order. As padded UTF-8 bytes: nothing is ever pickled."""
        payload = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self.device)
        size = torch.tensor([payload.numel()], dtype=torch.int64, device=self.device)
        sizes = self.gather_rows(size, label="text size").flatten().tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        padded[: payload.numel()] = payload
        if not max(sizes):
            return [""] * self.world_size
        rows = self.gather_rows(padded, label="text").cpu()
        return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, sizes, strict=True)]

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self.gather_rows(torch.zeros(1, dtype=torch.uint8, device=self.device), label="barrier")


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


def _require_fp32(op: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.float32:
        raise TypeError(f"{op} forms partial sums, so it takes float32 tensors; got {tensor.dtype}")
