"""Connections between the ranks of several hosts: TCP, on the interface that gloo uses."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dtrain.distributed.transport.connections import Connections
from dtrain.distributed.transport.shared_memory import try_on_every_rank

_OPEN_S = 30.0  # longest wait for the connections of the other ranks
_GREETING_S = 5.0  # longest wait for the first bytes of a connection
_MAX_IN_FLIGHT = 16  # messages of at most 4 KiB
_BUFFER_BYTES = 1 << 18  # of a socket: surely holds them, with what the kernel adds to each
_SIOCGIFADDR = 0x8915  # netdevice(7)
_GLOBAL_SCOPE = "00"  # of an IPv6 address in /proc/net/if_inet6
_TOKEN_BYTES = 16
_GREETING = struct.Struct(f"<{_TOKEN_BYTES}sq")  # token of the listening rank, rank that connects


class Sockets(Connections):
    """One TCP connection between any two ranks; the arguments are those of the base class."""

    name = "sockets"

    def open(self, exchange_text: Callable[[str], list[str]]) -> None:
        token, listeners = secrets.token_bytes(_TOKEN_BYTES), []
        opened: dict[int, socket.socket] = {}

        def listen() -> list[Any]:
            listeners.append(listen_for_ranks(len(self._unread)))
            address, port, *_ = listeners[0].getsockname()
            return [address, port, token.hex()]

        def connect() -> None:
            for rank in range(self._rank):
                address, port, other = reports[rank]
                opened[rank] = socket.create_connection((address, port), timeout=_OPEN_S)
                opened[rank].sendall(_GREETING.pack(bytes.fromhex(other), self._rank))
            deadline = time.monotonic() + _OPEN_S
            while len(opened) < len(self._unread):
                listeners[0].settimeout(max(deadline - time.monotonic(), 0.001))
                accepted, _ = listeners[0].accept()
                rank = _greeting(accepted, token)
                if rank in self._unread and rank not in opened:
                    opened[rank] = accepted
                else:  # not a rank of this run
                    accepted.close()

        reports, reason = try_on_every_rank(listen, exchange_text)
        if not reason:
            _, reason = try_on_every_rank(connect, exchange_text)
        for listener in listeners:
            listener.close()
        for rank, connection in opened.items():
            if reason:
                connection.close()
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
            connection.setblocking(False)
            self._readers[rank] = self._writers[rank] = connection.detach()
        self._max_in_flight = _MAX_IN_FLIGHT
        self.unsupported_reason = reason

    def _end(self) -> None:
        # to close it with bytes unread would make the kernel drop what was sent
        for end in self._writers.values():
            with suppress(OSError), socket.socket(fileno=os.dup(end)) as connection:
                connection.shutdown(socket.SHUT_WR)
        self.unsupported_reason = "the sockets were shut down"


def listen_for_ranks(backlog: int) -> socket.socket:
    """Listens where gloo would: on ``GLOO_SOCKET_IFNAME``, else on the address of the host's name, else locally."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        address = interface_address(interface)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, 0), family=family, backlog=backlog)
    with suppress(OSError):
        for family, *_, where in socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM):
            with suppress(OSError):
                return socket.create_server(where[:2], family=family, backlog=backlog)
    return socket.create_server(("127.0.0.1", 0), backlog=backlog)


def interface_address(interface: str) -> str:
    """Returns the IPv4 address of ``interface``, or its global IPv6 address if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        try:
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(query.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError:
            with suppress(OSError):
                for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
                    digits, _, _, scope, _, name = line.split()
                    if name == interface and scope == _GLOBAL_SCOPE:
                        return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
            raise


def _greeting(accepted: socket.socket, token: bytes) -> int:
    """Returns the rank that has connected, or -1 if it does not know ``token``."""
    accepted.settimeout(_GREETING_S)
    received = b""
    with suppress(OSError):
        while len(received) < _GREETING.size:
            chunk = accepted.recv(_GREETING.size - len(received))
            if not chunk:
                return -1
            received += chunk
        given, rank = _GREETING.unpack(received)
        return int(rank) if secrets.compare_digest(given, token) else -1
    return -1
