"""Connections between the ranks of one host: pipes, which are opened through ``/proc``."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable
from typing import Any

from dtrain.distributed.processes import open_descriptor
from dtrain.distributed.transport.connections import Connections, close_all
from dtrain.distributed.transport.shared_memory import try_on_every_rank


class Pipes(Connections):
    """One pipe from each rank to each other rank of one host; the arguments are those of the base class."""

    name = "pipes"

    def open(self, exchange_text: Callable[[str], list[str]]) -> None:
        created: dict[int, int] = {}  # the ends that the other ranks open

        def create() -> list[Any]:
            for rank in self._unread:
                self._readers[rank], created[rank] = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            # a message takes a page of a pipe at most; a pipe has fewer than 16 if this user has many
            self._max_in_flight = (
                min(fcntl.fcntl(r, fcntl.F_GETPIPE_SZ) for r in self._readers.values()) // mmap.PAGESIZE
            )
            return [os.getpid(), {rank: [end, os.fstat(end).st_ino] for rank, end in created.items()}]

        def connect() -> None:
            for rank in self._unread:
                pid, ends = reports[rank]
                descriptor, inode = ends[str(self._rank)]
                self._writers[rank] = open_descriptor(pid, descriptor, inode, os.O_WRONLY | os.O_NONBLOCK)

        try:
            reports, reason = try_on_every_rank(create, exchange_text)
            if not reason:
                _, reason = try_on_every_rank(connect, exchange_text)
        finally:
            close_all(created)  # the others have opened them by now; a rank that ends must hold the last write end
        if reason:
            self._close()
        self.unsupported_reason = reason
