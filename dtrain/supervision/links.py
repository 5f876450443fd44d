"""Connections between the watchers of a run's hosts, for heartbeats and reports of failures. Imports no torch.

The watcher of the first host listens, and the others connect to it, so that a run of many hosts has few connections. It
passes on what one of them reports. Messages are lines of JSON; the first one of a connection holds a token.
"""

from __future__ import annotations

import json
import math
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dtrain.distributed.processes import name_ranks

HEARTBEAT_S = 1.0
_CONNECT_S = 5.0
_TOKEN_S = 5.0  # that a connection has to send the token
_ALL_S = 30.0  # that all hosts have to connect, before the missing ones are named
_CLOSE_S = 0.5  # to send what is left at the end
_MAX_UNREAD_BYTES = 1 << 20  # of a connection; the culprits of a report may be many thousands of ranks
_MAX_TOKEN_BYTES = 200  # of the first line
_MAX_TEXT = 4096  # of a report


@dataclass(frozen=True)
class RanksOfHost:
    """A host name, and the ranks on that host."""

    name: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} ({name_ranks(self.ranks)})"


@dataclass(frozen=True)
class LinkJob:
    """The arguments of ``HostLinks``.

    Attributes:
        hosts: all hosts of the run; the watcher of the first one listens.
        index: that of this host among them.
        address: where the first host listens.
        port: see ``address``.
        token: proves that a connection is of this run.
        listener: descriptor of the socket that listens, on the first host.
    """

    hosts: tuple[RanksOfHost, ...]
    index: int
    address: str
    port: int
    token: str
    listener: int | None = None

    @staticmethod
    def decode(values: dict[str, Any]) -> LinkJob:
        hosts = tuple(RanksOfHost(host["name"], tuple(host["ranks"])) for host in values.pop("hosts"))
        return LinkJob(hosts, **values)


@dataclass(frozen=True)
class HostFailure:
    """A failure that the watcher of another host has reported.

    Attributes:
        text: names host and ranks.
        culprits: the ranks at fault.
        is_crash: whether they have ended, so that the ranks here may notice it by themselves.
        at: when it arrived.
    """

    text: str
    culprits: tuple[int, ...]
    is_crash: bool
    at: float


class _Connection:
    def __init__(self, connected: socket.socket, now: float, host: int | None = None) -> None:
        connected.setblocking(False)
        self.socket: socket.socket | None = connected
        self.host = host  # index; None until it has sent the token
        self.received_at = now
        self.is_over = False  # the run has ended there
        self.has_ended = False  # closed by either end, so this is no silence: the host of the other end is up
        self.unread = b""
        self.unsent = b""

    def send(self, message: dict[str, Any]) -> None:
        if message or not self.unsent:  # heartbeats do not queue
            self.unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        if self.socket is not None and self.unsent:
            with suppress(OSError):  # full; or ended, which receiving shows
                self.unsent = self.unsent[self.socket.send(self.unsent) :]

    def receive(self) -> list[Any]:
        """Returns the messages that have arrived; the connection is closed if there is something else among them."""
        limit = _MAX_TOKEN_BYTES if self.host is None else _MAX_UNREAD_BYTES
        try:
            while self.socket is not None and len(self.unread) <= limit:
                chunk = self.socket.recv(1 << 14)
                if not chunk:
                    self.close()
                self.unread += chunk
        except BlockingIOError:
            pass
        except OSError as error:
            self.close(is_silence=not isinstance(error, ConnectionError))
        *lines, self.unread = self.unread.split(b"\n")
        messages = []
        try:
            if len((lines or [self.unread])[0]) > limit:
                raise ValueError("too long")
            for line in lines:
                messages.append(json.loads(line))
        except (ValueError, RecursionError):
            self.close()
        return messages

    def close(self, *, is_silence: bool = False) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket, self.has_ended = None, not is_silence

    def finish(self) -> None:
        """Sends what is left, and closes the connection."""
        if self.socket is not None:
            with suppress(OSError):
                self.socket.settimeout(_CLOSE_S)
                self.socket.sendall(self.unsent)
                self.socket.setblocking(False)
            self.receive()  # to close it with bytes unread would make the kernel drop what was sent
            self.close()


class HostLinks:
    """The connections of this watcher to the watchers of other hosts.

    Attributes:
        reports: failures that other hosts have reported.
        notices: sentences for the user, which the caller removes.

    Raises:
        OSError: the first host cannot be reached.
    """

    def __init__(self, job: LinkJob, now: float) -> None:
        self.reports: list[HostFailure] = []
        self.notices: list[str] = []
        self._job = job
        self._connections: list[_Connection] = []
        self._listener: socket.socket | None = None
        self._sent_at = now
        self._missing_at = now + _ALL_S  # when hosts that have not connected are named
        if job.listener is not None:
            self._listener = socket.socket(fileno=job.listener)
            self._listener.setblocking(False)
        else:
            connected = socket.create_connection((job.address, job.port), timeout=_CONNECT_S)
            self._connections.append(_Connection(connected, now, 0))
            self._connections[0].send({"token": job.token, "host": job.index})

    @property
    def here(self) -> RanksOfHost:
        return self._job.hosts[self._job.index]

    def poll(self, now: float) -> None:
        """Receives what has arrived, and sends a heartbeat if one is due."""
        self._accept(now)
        for connection in self._connections:
            connection.flush()
            was_open = connection.socket is not None
            for message in connection.receive():
                self._take(connection, message, now)
            if connection.host is None and now - connection.received_at > _TOKEN_S:
                connection.close()
            if was_open and connection.has_ended and connection.host is not None and not connection.is_over:
                self.notices.append(_unseen("the connection to the watcher of {} has ended", self._of(connection)))
        self._connections = [c for c in self._connections if c.socket is not None or c.host is not None]
        if now - self._sent_at >= HEARTBEAT_S:
            self._sent_at = now
            self._send({})

    def _accept(self, now: float) -> None:
        if self._listener is None:
            return
        known = {0, *(connection.host for connection in self._connections)}
        missing = [host for index, host in enumerate(self._job.hosts) if index not in known]
        if missing and now > self._missing_at:
            self._missing_at = math.inf
            self.notices += [_unseen("the watcher of {} has not connected", host) for host in missing]
        if not missing:
            self._listener.close()
            self._listener = None
            return
        with suppress(OSError):  # nothing more to accept
            while len(self._connections) < 2 * len(self._job.hosts):
                self._connections.append(_Connection(self._listener.accept()[0], now))

    def _take(self, connection: _Connection, message: Any, now: float) -> None:
        if connection.host is None:
            token, host = (message.get(key) for key in ("token", "host")) if isinstance(message, dict) else ("", 0)
            known = {other.host for other in self._connections}
            given = str(token).encode(errors="replace")  # only ASCII may be compared as text
            if secrets.compare_digest(given, self._job.token.encode()) and host in range(1, len(self._job.hosts)):
                connection.host = None if host in known else host
            if connection.host is None:  # not a watcher of this run
                connection.close()
                return
        connection.received_at = now
        if "text" in message:
            self.reports.append(HostFailure(message["text"], tuple(message["culprits"]), message["is_crash"], now))
            self._send(message, without=connection)
        elif "over" in message:
            connection.is_over = True

    def _send(self, message: dict[str, Any], without: _Connection | None = None) -> None:
        for connection in self._connections:
            if connection.host is not None and connection is not without:
                connection.send(message)

    def report(self, text: str, culprits: Sequence[int], *, is_crash: bool) -> None:
        """Reports a failure to the other hosts."""
        self._send({"text": text[:_MAX_TEXT], "culprits": list(culprits), "is_crash": is_crash})

    def silent(self, now: float, limit_s: float) -> list[RanksOfHost]:
        """Returns the hosts whose last heartbeat is older than ``limit_s``.

        Left out are those that have never connected, and those of ``endings``.
        """
        return [
            self._of(connection)
            for connection in self._connections
            if connection.host is not None
            and not (connection.is_over or connection.has_ended)
            and now - connection.received_at > limit_s
        ]

    def endings(self) -> list[str]:
        """Returns a clause for each host on which the run is over, or whose watcher has ended before it."""
        return [
            f"the run is over on {self._of(connection)}"
            if connection.is_over
            else f"the watcher of {self._of(connection)} has ended"
            for connection in self._connections
            if connection.host is not None and (connection.is_over or connection.has_ended)
        ]

    def _of(self, connection: _Connection) -> RanksOfHost:
        assert connection.host is not None
        return self._job.hosts[connection.host]

    def reset_silence(self, now: float) -> None:
        """Counts the silence of the other hosts from now on."""
        for connection in self._connections:
            connection.received_at = now

    def close(self) -> None:
        """Reports to the other hosts that the run has ended here, and closes all connections."""
        self._send({"over": True})
        for connection in self._connections:
            connection.finish()
        if self._listener is not None:
            self._listener.close()


def _unseen(what: str, host: RanksOfHost) -> str:
    return f"{what.format(host)}, so this host does not see whether {host.name} is up"
