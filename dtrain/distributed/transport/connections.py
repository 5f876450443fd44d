"""Small messages between ranks, sent and received by the thread that computes.

In gloo the smallest collective is slow, because its threads compete with the computing thread for the core. A message
over a connection of this module takes that thread a few system calls. A connection shows when the process at its other
end has ended, unless a child that the process forked still holds that end; then the time-out is left.

[Note: full connections] A write waits while the connection is full, yet no ranks wait for each other in a circle. Let p
be the number of messages that the smallest connection is sure to hold; a rank sends message n only after it has
received message n - p from all others. Let a rank wait to write message n to another rank, whose connection holds
messages n - p to n - 1. The other rank has not received message n - p, so it has not begun message n. A rank that waits
to receive message n has sent it, and waits for one that has not begun it or waits to write it. So a chain of waits
leads to ranks that are further and further behind, and the last one does not wait.
"""

from __future__ import annotations

import os
import select
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import ClassVar
from weakref import finalize

from dtrain.distributed.schedule import Collective
from dtrain.distributed.transport.messages import HEADER, Message, failure_message, find_failure
from dtrain.errors import DtrainError

_ENDED = getattr(select, "POLLRDHUP", 0)  # besides POLLHUP and POLLERR, which poll reports always
_MAX_TIMEOUT_MS = 2**31 - 1  # of poll
_CLOSE_MS = 500  # longest wait for space in a connection for the failure of this rank


class Connections(ABC):
    """One connection from each rank to each other rank; every rank sends the same kinds of messages in one order.

    Failures are ``RuntimeError``: no message within the time-out, or a rank that has ended. A message of another
    collective or length is a ``DivergenceError``; a rank that has failed sends what it raises.

    Args:
        rank: rank of this process.
        world_size: number of ranks.
        timeout: longest wait for a message, or for space in a connection.
        names: ranks of the run, by rank here, for messages to people; None: the same.

    Attributes:
        name: of the kind of connections, in messages.
        unsupported_reason: why nothing can be sent; empty if it can.
    """

    name: ClassVar[str]

    def __init__(self, rank: int, world_size: int, timeout: timedelta, names: Sequence[int] | None = None) -> None:
        self.unsupported_reason = f"the {self.name} are not open yet"
        self._rank = rank
        self._names = range(world_size) if names is None else names
        self._timeout_s = timeout.total_seconds()
        self._unread = {other: bytearray() for other in range(world_size) if other != rank}
        self._readers: dict[int, int] = {}  # descriptors by rank
        self._writers: dict[int, int] = {}
        self._close = finalize(self, close_all, self._readers, self._writers)
        self._max_in_flight = 0
        self._in_flight: deque[Message] = deque()  # sent and not received
        self._num_sent = 0

    @abstractmethod
    def open(self, exchange_text: Callable[[str], list[str]]) -> None:
        """Opens the connections, or gives a reason if that fails on some rank; all ranks call.

        Args:
            exchange_text: sends a text to all ranks and returns that of every rank.
        """

    def release(self) -> None:
        """Closes the connections; nothing more is sent or received."""
        self._close()
        self.unsupported_reason = f"the {self.name} were released"

    def send(self, what: Collective, payload: bytes = b"") -> Message:
        """Sends ``payload`` to all other ranks, as a part of ``what``."""
        self._require_open()
        while len(self._in_flight) >= self._max_in_flight:  # [Note: full connections]
            self._receive_oldest()
        message = Message(self._names[self._rank], self._num_sent, what, payload)
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
        """Whether ``receive`` would not wait."""
        while message.payloads is None:
            if not self._receive_oldest(waits=False):
                return False
        return True

    def _receive_oldest(self, *, waits: bool = True) -> bool:
        """Receives the oldest message in flight; returns False if that would take a wait and ``waits`` is not set."""
        self._require_open()
        message = self._in_flight[0]
        missing = {
            r: end for r, end in self._readers.items() if not message.is_complete(self._names[r], self._unread[r])
        }
        while missing:
            for rank in self._wait(missing, select.POLLIN) if waits else list(missing):
                try:
                    chunk = os.read(missing[rank], select.PIPE_BUF)
                except BlockingIOError:  # never after a wait
                    return False
                except ConnectionError:
                    chunk = b""
                if not chunk:
                    raise RuntimeError(f"rank {self._names[rank]} has ended")
                self._unread[rank] += chunk
                if message.is_complete(self._names[rank], self._unread[rank]):
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
        while data:
            try:
                data = data[os.write(writer, data) :]
            except BlockingIOError:
                self._wait({rank: writer}, select.POLLOUT)
            except ConnectionError:  # what the rank has sent before it ended says why, and is read where it is awaited
                return

    def close_failed(self, failure: DtrainError) -> None:
        """Sends ``failure`` to the other ranks, as far as there is space, and ends the connections."""
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
        self._end()

    def _end(self) -> None:
        """Ends the connections in a way that loses nothing of what was sent."""
        self.release()

    def failure_of_others(self) -> DtrainError | None:
        """Returns the failure that another rank has sent, if any has; what else it has sent is dropped."""
        for rank in self._readers:
            found = self._failure_of(rank)
            if found is not None:
                return found
        return None

    def _failure_of(self, rank: int) -> DtrainError | None:
        with suppress(OSError):  # nothing more to read, or the rank has ended
            while chunk := os.read(self._readers[rank], select.PIPE_BUF):
                self._unread[rank] += chunk
        return find_failure(self._names[rank], self._unread[rank])

    def ended_ranks(self) -> list[int]:
        """Returns the ranks whose connection has ended, and which have sent no failure before."""
        poll = select.poll()
        for reader in self._readers.values():
            poll.register(reader, _ENDED)
        ended = {end for end, _ in poll.poll(0)}
        return [rank for rank, end in self._readers.items() if end in ended and self._failure_of(rank) is None]

    def _wait(self, ends: Mapping[int, int], event: int) -> list[int]:
        """Returns the ranks whose end is ready or has failed; at least one."""
        poll = select.poll()
        for end in ends.values():
            poll.register(end, event)
        ready = {end for end, _ in poll.poll(min(1000 * self._timeout_s, _MAX_TIMEOUT_MS))}
        if not ready:
            what = "sent no message" if event == select.POLLIN else "read no message"
            ranks = ", ".join(str(self._names[rank]) for rank in ends)
            raise RuntimeError(f"rank {ranks} {what} for {self._timeout_s:g} s")
        return [rank for rank, end in ends.items() if end in ready]

    def _require_open(self) -> None:
        if self.unsupported_reason:  # the numbers of the descriptors may be other files by now
            raise RuntimeError(self.unsupported_reason)


def close_all(*descriptors: dict[int, int]) -> None:
    """Closes the files of some ``descriptors`` by rank, and empties them; two may hold the same ones."""
    for end in {end for by_rank in descriptors for end in by_rank.values()}:
        os.close(end)
    for by_rank in descriptors:
        by_rank.clear()
