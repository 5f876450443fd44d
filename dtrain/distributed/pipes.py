"""Small messages between the ranks of one host, through pipes.

In gloo the smallest collective is slow, because its threads compete with the computing thread for the core. A message
in a pipe takes that thread a few system calls. Like a socket, a pipe shows when the process at its other end has
ended, unless a child that the process forked still holds that end; then the time-out is left.

[Note: full pipes] A write waits while the pipe is full, yet no ranks wait for each other in a circle. A message takes
one page of a pipe at most, and a rank has at most as many messages that it has sent and not received as its smallest
pipe has pages. Let a rank wait to write message n to another rank, whose pipe holds the p messages n - p to n - 1. The
other rank has not received message n - p, so it has not begun message n. A rank that waits to receive message n has
sent it, and waits for one that has not begun it or waits to write it. So a chain of waits leads to ranks that are
further and further behind, and the last one does not wait.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import finalize

from dtrain.distributed.logging import logger
from dtrain.distributed.messages import HEADER, MAX_PAYLOAD_BYTES, Message, Messages, failure_message, find_failure
from dtrain.distributed.processes import open_descriptor
from dtrain.distributed.schedule import Collective
from dtrain.distributed.shared_memory import try_on_every_rank
from dtrain.errors import DtrainError

_MAX_TIMEOUT_MS = 2**31 - 1  # of poll
_CLOSE_MS = 500  # longest wait for space in a pipe for the failure of this rank


class Pipes(Messages):
    """One pipe from each rank to each other rank of one host; every rank sends the same kinds of messages in one order.

    Failures are ``RuntimeError``: no message within the time-out, or a rank that has ended. A message of another
    collective or length is a ``DivergenceError``; a rank that has failed sends what it raises.

    Args:
        rank: rank of this process.
        world_size: number of ranks.
        timeout: longest wait for a message, or for space in a pipe.

    Attributes:
        unsupported_reason: why nothing can be sent; empty if it can.
    """

    max_payload_bytes = MAX_PAYLOAD_BYTES
    batches = False

    def __init__(self, rank: int, world_size: int, timeout: timedelta) -> None:
        self.unsupported_reason = "the pipes are not open yet"
        self._rank = rank
        self._timeout_s = timeout.total_seconds()
        self._unread = {other: bytearray() for other in range(world_size) if other != rank}
        self._readers: dict[int, int] = {}  # descriptors by rank
        self._writers: dict[int, int] = {}
        self._close = finalize(self, _close_all, self._readers, self._writers)
        self._max_in_flight = 0
        self._in_flight: deque[Message] = deque()  # sent and not received
        self._num_sent = 0

    def open(self, exchange_text: Callable[[str], list[str]]) -> None:
        """Opens the pipes, or gives a reason if that fails on some rank; all ranks call.

        Args:
            exchange_text: sends a text to all ranks and returns that of every rank.
        """
        created: dict[int, int] = {}  # the ends that the other ranks open

        def create() -> list[Any]:
            for rank in self._unread:
                self._readers[rank], created[rank] = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            # fewer than 16 if this user has many pipes
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
            _close_all(created)  # the others have opened them by now; a rank that ends must hold the last write end
        if reason:
            self._close()
            logger.info(f"buffers are sent through sockets, not shared memory: {reason}")
        self.unsupported_reason = reason

    def release(self) -> None:
        """Closes the pipes; nothing more is sent or received."""
        self._close()
        self.unsupported_reason = "the pipes were released"

    def send(self, what: Collective, payload: bytes = b"") -> Message:
        """Sends ``payload`` to all other ranks, as a part of ``what``."""
        self._require_open()
        while len(self._in_flight) >= self._max_in_flight:  # [Note: full pipes]
            self._receive_oldest()
        message = Message(self._rank, self._num_sent, what, payload)
        # first: after a failed write the others find a gap in the numbers
        self._num_sent += 1
        self._in_flight.append(message)
        for rank, writer in self._writers.items():
            self._write(rank, writer, message.header + payload)
        return message

    def receive(self, message: Message) -> list[bytes]:
        """Returns the payloads of all ranks, in rank order, that were sent as ``message`` was."""
        while message.payloads is None:
            self._receive_oldest()
        return message.payloads

    def has_arrived(self, message: Message) -> bool:
        """Whether :meth:`receive` would not wait."""
        while message.payloads is None:
            if not self._receive_oldest(waits=False):
                return False
        return True

    def _receive_oldest(self, *, waits: bool = True) -> bool:
        """Receives the oldest message in flight; returns False if that would take a wait and ``waits`` is not set."""
        self._require_open()
        message = self._in_flight[0]
        missing = {r: end for r, end in self._readers.items() if not message.is_complete(r, self._unread[r])}
        while missing:
            for rank in self._wait(missing, select.POLLIN) if waits else list(missing):
                try:
                    chunk = os.read(missing[rank], select.PIPE_BUF)
                except BlockingIOError:  # never after a wait
                    return False
                if not chunk:
                    raise RuntimeError(f"rank {rank} has ended")
                self._unread[rank] += chunk
                if message.is_complete(rank, self._unread[rank]):
                    del missing[rank]
        start, stop = HEADER.size, HEADER.size + len(message.payload)
        received = {rank: bytes(unread[start:stop]) for rank, unread in self._unread.items()}
        for unread in self._unread.values():
            del unread[:stop]
        received[self._rank] = message.payload
        message.payloads = [received[rank] for rank in sorted(received)]
        self._in_flight.popleft()
        return True

    def _write(self, rank: int, writer: int, data: bytes) -> None:
        while True:
            try:
                os.write(writer, data)  # all or nothing
                return
            except BlockingIOError:
                self._wait({rank: writer}, select.POLLOUT)
            except BrokenPipeError:  # what the rank has sent before it ended says why, and is read where it is awaited
                return

    def close_failed(self, failure: DtrainError) -> None:
        """Sends ``failure`` to the other ranks, as far as their pipes have space, and closes the pipes."""
        if self.unsupported_reason:
            return
        data = failure_message(failure)
        for writer in self._writers.values():
            with suppress(OSError):
                try:
                    os.write(writer, data)
                except BlockingIOError:
                    poll = select.poll()
                    poll.register(writer, select.POLLOUT)
                    poll.poll(_CLOSE_MS)
                    os.write(writer, data)
        self.release()

    def failure_of_others(self) -> DtrainError | None:
        """Returns the failure that another rank has sent, if any has; what else it has sent is dropped."""
        for rank, reader in self._readers.items():
            with suppress(BlockingIOError):
                while chunk := os.read(reader, select.PIPE_BUF):
                    self._unread[rank] += chunk
            found = find_failure(rank, self._unread[rank])
            if found is not None:
                return found
        return None

    def _wait(self, ends: Mapping[int, int], event: int) -> list[int]:
        """Returns the ranks whose end is ready or has failed; at least one."""
        poll = select.poll()
        for end in ends.values():
            poll.register(end, event)
        ready = {end for end, _ in poll.poll(min(1000 * self._timeout_s, _MAX_TIMEOUT_MS))}
        if not ready:
            what = "sent no message" if event == select.POLLIN else "read no message"
            raise RuntimeError(f"rank {', '.join(map(str, ends))} {what} for {self._timeout_s:g} s")
        return [rank for rank, end in ends.items() if end in ready]

    def _require_open(self) -> None:
        if self.unsupported_reason:  # the numbers of the descriptors may be other files by now
            raise RuntimeError(self.unsupported_reason)


def _close_all(*descriptors: dict[int, int]) -> None:
    for by_rank in descriptors:
        while by_rank:
            os.close(by_rank.popitem()[1])
