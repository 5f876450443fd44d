"""Memory that the ranks of one host read from each other.

A region is one anonymous file (``memfd_create``) for each rank, all of one size; every rank maps those of all ranks.
The files have no name, so nothing stays behind however a process ends. They are opened through ``/proc/<pid>/fd/<n>``,
which the kernel grants to processes of the same user.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from dtrain.distributed import processes
from dtrain.errors import CommunicationError, DivergenceError

_MAX_VIEWS = 4096  # of other ranks' buffers that are kept


class SharedMemory:
    """The regions of all ranks, which are on one host; they live as long as this object.

    Every rank calls the constructor and ``allocate`` in the same order. A failure on one rank is a failure on all,
    and from then on nothing is allocated.

    Args:
        rank: rank of this process.
        exchange_text: sends a text to all ranks and returns that of every rank.
        members: of those ranks, the ones whose regions this object maps; None: all.

    Attributes:
        unsupported_reason: why nothing can be allocated; empty if it can.
    """

    def __init__(
        self, rank: int, exchange_text: Callable[[str], list[str]], members: Sequence[int] | None = None
    ) -> None:
        self._rank = rank
        self._exchange_text = exchange_text
        self._members = members
        self._regions: list[list[UntypedStorage]] = []  # each by rank
        self._numbers: dict[int, int] = {}  # region by the address of this rank's file in it
        self._views: dict[tuple[object, ...], Tensor] = {}  # of other ranks' buffers, by the arguments of `read`
        self.unsupported_reason = ""

    def _on_every_rank(self, work: Callable[[], Any]) -> list[Any] | None:
        """Returns ``work()`` (plain JSON) of every rank, or None, with a reason, if it failed on one."""
        values, self.unsupported_reason = try_on_every_rank(work, self._exchange_text)
        if self.unsupported_reason:
            return None
        return values if self._members is None else [values[member] for member in self._members]

    def allocate(self, nbytes: int) -> UntypedStorage | None:
        """Returns this rank's ``nbytes`` zeros of a new region, or None; see ``unsupported_reason``."""
        if self.unsupported_reason:
            return None
        descriptor = -1

        def create() -> list[int]:
            nonlocal descriptor
            descriptor = os.memfd_create("dtrain", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.posix_fallocate(descriptor, 0, nbytes)  # fails now; touching pages that cannot be had would kill
            # a rank that truncated its file would kill the readers
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return [os.getpid(), descriptor, os.fstat(descriptor).st_ino]

        region: list[UntypedStorage] = []
        try:
            files = self._on_every_rank(create)
            if files is None or self._on_every_rank(lambda: region.extend(_map(f, nbytes) for f in files)) is None:
                return None
        finally:
            if descriptor >= 0:  # the others have opened it by now, and mappings outlive the descriptor
                os.close(descriptor)
        self._numbers[region[self._rank].data_ptr()] = len(self._regions)
        self._regions.append(region)
        return region[self._rank]

    def release(self) -> None:
        """Drops the regions; nothing more is allocated."""
        self._regions.clear()
        self._numbers.clear()
        self._views.clear()
        self.unsupported_reason = "it was released"

    @property
    def foreign(self) -> list[UntypedStorage]:
        """The files of the other ranks."""
        return [storage for region in self._regions for storage in region if storage is not region[self._rank]]

    def foreign_nbytes(self) -> int:
        """Returns the bytes of the other ranks' files that are resident in this process, which has read them."""
        others = {storage.data_ptr() for storage in self.foreign}
        text = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")
        sizes = re.findall(r"^([0-9a-f]+)-[0-9a-f]+ .*\n(?:[A-Z].*\n)*?Rss:\s+(\d+) kB$", text, re.M)
        return sum(1024 * int(kib) for start, kib in sizes if int(start, 16) in others)

    def find(self, tensor: Tensor) -> tuple[int, int] | None:
        """Returns (number of the region, byte offset) of a contiguous ``tensor``, or None if it lies elsewhere."""
        number = self._numbers.get(tensor.untyped_storage().data_ptr())
        if number is None or not tensor.is_contiguous():
            return None
        return number, int(tensor.storage_offset()) * tensor.element_size()

    def read(self, rank: int, region: int, offset: int, like: Tensor) -> Tensor:
        """Returns the 1-D tensor of ``rank`` at ``offset`` bytes, with the dtype and number of elements of ``like``."""
        key = rank, region, offset, like.dtype, like.numel()
        if (known := self._views.get(key)) is not None:  # the same buffers are read in each step
            return known
        storage = self._regions[region][rank]
        if offset + like.nbytes > storage.nbytes():
            raise CommunicationError(
                f"rank {rank} offers {like.nbytes} bytes at {offset} of region {region}, which has {storage.nbytes()}"
            )
        if len(self._views) == _MAX_VIEWS:
            self._views.clear()
        view = torch.empty(0, dtype=like.dtype).set_(storage, offset // like.element_size(), (like.numel(),))  # type: ignore[call-overload]
        self._views[key] = view
        return view  # type: ignore[no-any-return]


def compare_hosts(exchange_text: Callable[[str], list[str]], *, is_allowed: bool) -> str:
    """Returns why the ranks cannot share memory, or nothing; a collective.

    Raises:
        DivergenceError: ``is_allowed`` differs between the ranks.
    """
    reports, reason = try_on_every_rank(lambda: [is_allowed, _host_of_memory() if is_allowed else None], exchange_text)
    for rank, (allowed, _) in enumerate(reports):
        if allowed != reports[0][0]:
            raise DivergenceError(
                f"shared memory between ranks is allowed: {reports[0][0]} on rank 0, {allowed} on rank {rank}; give "
                f"all ranks the same"
            )
    if not is_allowed:
        return "it is not allowed"
    if any(host != reports[0][1] for _, host in reports):
        return "the ranks are on several hosts or in several containers"
    return reason


def try_on_every_rank(work: Callable[[], Any], exchange_text: Callable[[str], list[str]]) -> tuple[list[Any], str]:
    """Returns ``work()`` (plain JSON) of every rank, or nothing and a reason if it failed on one."""
    try:
        report = {"value": work()}
    except (OSError, RuntimeError) as error:
        report = {"error": str(error).splitlines()[0]}
    reports = [json.loads(text) for text in exchange_text(json.dumps(report))]
    for rank, other in enumerate(reports):
        if "error" in other:
            return [], f"rank {rank}: {other['error']}"
    return [other["value"] for other in reports], ""


def _host_of_memory() -> list[str]:
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create")
    host = processes.host_identity()
    if host is None:
        raise OSError("this system does not identify the host in /proc")
    return host


def _map(file: tuple[int, int, int], nbytes: int) -> UntypedStorage:
    opened = processes.open_descriptor(*file, os.O_RDWR)
    try:
        return UntypedStorage.from_file(f"/proc/self/fd/{opened}", shared=True, nbytes=nbytes)  # type: ignore[return-value]
    finally:
        os.close(opened)
