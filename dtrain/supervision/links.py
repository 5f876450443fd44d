"""Connections between the watchers of a run's hosts, for heartbeats and reports of failures. Imports no torch.

The watcher of the first host listens, and the others connect to it, so that a run of many hosts has few connections. It
passes on what one of them reports. Messages are lines of JSON; the first one of a connection holds a token.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dtrain.distributed.processes import name_ranks

HEARTBEAT_S = 1.0
_CONNECT_S = 5.0
_MAX_UNREAD_BYTES = 1 << 16  # of a connection


@dataclass(frozen=True)
class RanksOfHost:
    """A host name, and the ranks on that host."""

    name: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} ({name_ranks(self.ranks)})"


@dataclass(frozen=True)
class LinkJob:
    """The arguments of :class:`HostLinks`.

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
        self.heard_at = now
        self.is_over = False  # the run has ended there
        self.unread = b""

    def send(self, message: dict[str, Any]) -> None:
        if self.socket is not None:
            with suppress(OSError):  # full, or ended: the other side is silent too
                self.socket.send(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Any]:
        """Returns the messages that have arrived, none of them without a line's end."""
        try:
            while self.socket is not None and len(self.unread) < _MAX_UNREAD_BYTES:
                chunk = self.socket.recv(1 << 14)
                if not chunk:
                    self.close()
                self.unread += chunk
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        *lines, self.unread = self.unread.split(b"\n")
        try:
            return [json.loads(line) for line in lines]
        except ValueError:
            self.close()
            return []

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None


class HostLinks:
    """This watcher's connections to those of the other hosts.

    Attributes:
        reports: failures that other hosts have reported.

    Raises:
        OSError: the first host cannot be reached.
    """

    def __init__(self, job: LinkJob, now: float) -> None:
        self.reports: list[HostFailure] = []
        self._job = job
        self._connections: list[_Connection] = []
        self._listener: socket.socket | None = None
        self._sent_at = now
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
            for message in connection.receive():
                self._take(connection, message, now)
        self._connections = [c for c in self._connections if c.socket is not None or c.host is not None]
        if now - self._sent_at >= HEARTBEAT_S:
            self._sent_at = now
            self._send({})

    def _accept(self, now: float) -> None:
        if self._listener is None:
            return
        if sum(connection.host is not None for connection in self._connections) == len(self._job.hosts) - 1:
            self._listener.close()
            self._listener = None
            return
        with suppress(OSError):  # nothing more to accept
            while len(self._connections) < 2 * len(self._job.hosts):
                self._connections.append(_Connection(self._listener.accept()[0], now))

    def _take(self, connection: _Connection, message: Any, now: float) -> None:
        connection.heard_at = now
        if connection.host is None:
            token, host = (message.get(key) for key in ("token", "host")) if isinstance(message, dict) else ("", 0)
            known = {other.host for other in self._connections}
            if secrets.compare_digest(str(token), self._job.token) and host in range(1, len(self._job.hosts)):
                connection.host = None if host in known else host
            if connection.host is None:  # not a watcher of this run
                connection.close()
        elif "text" in message:
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
        self._send({"text": text, "culprits": list(culprits), "is_crash": is_crash})

    def silent(self, now: float, limit_s: float) -> list[RanksOfHost]:
        """Returns the hosts whose last heartbeat is older than ``limit_s``; those that have sent none are left out."""
        return [
            self._job.hosts[connection.host]
            for connection in self._connections
            if connection.host is not None and not connection.is_over and now - connection.heard_at > limit_s
        ]

    def forgive(self, now: float) -> None:
        """Counts the silence of the other hosts from now on."""
        for connection in self._connections:
            connection.heard_at = now

    def close(self) -> None:
        """Tells the other hosts that the run has ended here."""
        self._send({"over": True})
        for connection in self._connections:
            connection.close()
