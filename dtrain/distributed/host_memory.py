"""Memory that the ranks of one host read from each other.

A region is one anonymous file (``memfd_create``) a rank, all of one size; every rank maps those of all ranks. The files
have no name: nothing is left behind however a process ends. They are opened through ``/proc/<pid>/fd/<n>``, which the
kernel grants to processes of the same user.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from dtrain.errors import CommunicationError


class SharedMemory:
    """The regions of all ranks. They live as long as this object, so a region is for what a run keeps.

    Every rank calls the constructor and :meth:`allocate` in the same order. What fails on one rank fails on all, and
    from then on nothing is allocated.

    Args:
        rank: of this process.
        exchange_text: hands a text to all ranks and returns that of every rank.

    Attributes:
        refusal: why nothing is allocated; empty while all is well.
    """

    def __init__(self, rank: int, exchange_text: Callable[[str], list[str]]) -> None:
        self._rank = rank
        self._exchange_text = exchange_text
        self._regions: list[list[UntypedStorage]] = []  # of every rank
        self._numbers: dict[int, int] = {}  # of the regions, by the address of this rank's part
        self.refusal = ""
        hosts = self._on_every_rank(_identify_host)
        if hosts is not None and any(host != hosts[0] for host in hosts):
            self.refusal = "the ranks are on several hosts or in several containers"

    def _on_every_rank(self, work: Callable[[], Any]) -> list[Any] | None:
        """What ``work`` returned (plain JSON) on every rank, or None with a refusal where it failed on one."""
        try:
            report = {"value": work()}
        except (OSError, RuntimeError) as error:
            report = {"error": str(error).splitlines()[0]}
        reports = [json.loads(text) for text in self._exchange_text(json.dumps(report))]
        for rank, other in enumerate(reports):
            if "error" in other:
                self.refusal = f"rank {rank}: {other['error']}"
                return None
        return [other["value"] for other in reports]

    def allocate(self, nbytes: int) -> UntypedStorage | None:
        """This rank's part, zeros, of a new region with ``nbytes`` on every rank; None: see :attr:`refusal`."""
        if self.refusal:
            return None
        own = -1

        def create() -> list[int]:
            nonlocal own
            own = os.memfd_create("dtrain", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.posix_fallocate(own, 0, nbytes)  # an error now, where touching memory that is not there would kill
            fcntl.fcntl(own, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return [os.getpid(), own, os.fstat(own).st_ino]

        parts: list[UntypedStorage] = []
        try:
            places = self._on_every_rank(create)
            if places is None or self._on_every_rank(lambda: parts.extend(_map(p, nbytes) for p in places)) is None:
                return None
        finally:
            if own >= 0:
                os.close(own)
        self._numbers[parts[self._rank].data_ptr()] = len(self._regions)
        self._regions.append(parts)
        return parts[self._rank]

    def find(self, tensor: Tensor) -> tuple[int, int] | None:
        """(number of the region, byte offset) of a contiguous ``tensor``; None where it lies elsewhere."""
        number = self._numbers.get(tensor.untyped_storage().data_ptr())
        if number is None or not tensor.is_contiguous():
            return None
        return number, int(tensor.storage_offset()) * tensor.element_size()

    def read(self, rank: int, region: int, offset: int, like: Tensor) -> Tensor:
        """The 1-D tensor of ``rank`` at ``offset`` bytes, with the dtype and number of elements of ``like``."""
        part = self._regions[region][rank]
        if offset + like.nbytes > part.nbytes():
            raise CommunicationError(
                f"rank {rank} offers {like.nbytes} bytes at {offset} of region {region}, which has {part.nbytes()}"
            )
        return torch.empty(0, dtype=like.dtype).set_(part, offset // like.element_size(), (like.numel(),))  # type: ignore[call-overload,no-any-return]


def _identify_host() -> list[str]:
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create")
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return [file.read().strip(), os.readlink("/proc/self/ns/pid")]


def _map(place: tuple[int, int, int], nbytes: int) -> UntypedStorage:
    pid, descriptor, inode = place
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(opened).st_ino != inode:
            raise OSError(f"/proc/{pid} is another process here")
        return UntypedStorage.from_file(f"/proc/self/fd/{opened}", shared=True, nbytes=nbytes)  # type: ignore[return-value]
    finally:
        os.close(opened)
