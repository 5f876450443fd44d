"""The lease file ``lease-00000001.json``: it names the process that may write in a directory of checkpoints.

The file with the highest token counts. It names its holder, which increments its heartbeat counter every few seconds.
Anyone who can write to the directory can write such a file, so it is parsed strictly, and a damaged one only makes
others wait.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from dtrain.checkpoint.format.checked_file import DamageError, open_regular, parse_json, read_bytes
from dtrain.distributed.processes import host_identity, process_start

NAME = re.compile(r"lease-([0-9]{8})\.json")
TEMPORARY = re.compile(r"lease-[0-9]{8}\.tmp-[0-9a-f]+")
LAST_TOKEN = 10**8 - 1
HEARTBEAT_LIMIT_S = 90.0
"""Seconds without a heartbeat after which another process may take the lease over."""
_SIZE_LIMIT = 4096  # bytes
_HOST = re.compile(r"[\w.-]{1,255}", re.ASCII)
_ID = re.compile(r"[0-9a-f]{32}")
_PID_LIMIT = 1 << 31
_TYPES = {"int": (int,), "str": (str,), "str | None": (str, type(None))}  # by the annotation of a field


@dataclass(frozen=True)
class Holder:
    """Content of a lease file.

    Attributes:
        token: the number in the file's name; each takeover has a higher one.
        counter: number of heartbeats so far.
        id: random identifier of this acquisition.
        host: host name, for people only.
        boot_id: identifies the running system; None if the system does not provide one.
        pid_start: start time of the process in kernel ticks.
        pid_namespace: namespace in which ``pid`` is valid.
    """

    token: int
    counter: int
    id: str
    host: str
    boot_id: str | None
    pid: int
    pid_start: str | None
    pid_namespace: str | None

    @staticmethod
    def this_process(token: int) -> Holder:
        boot_id, namespace = host_identity() or (None, None)
        host = socket.gethostname()
        return Holder(
            token=token,
            counter=0,
            id=secrets.token_hex(16),
            host=host if _HOST.fullmatch(host) else "unknown",
            boot_id=boot_id,
            pid=os.getpid(),
            pid_start=process_start("self"),
            pid_namespace=namespace,
        )

    def with_heartbeat(self) -> Holder:
        return replace(self, counter=self.counter + 1)

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def decode(data: bytes, file: str) -> Holder:
        """Parses the bytes of a lease file; raises ``DamageError`` unless this version writes such files."""
        raw = parse_json(data, file)
        types = {item.name: _TYPES[str(item.type)] for item in fields(Holder)}
        typed = raw.keys() == types.keys() and all(type(raw[name]) in types[name] for name in types)
        if not typed or not _ID.fullmatch(raw["id"]) or not _HOST.fullmatch(raw["host"]):
            raise DamageError(file, "its fields are not those of a lease", "lease")
        if raw["token"] != _token(file) or raw["counter"] < 0 or not 0 < raw["pid"] < _PID_LIMIT:
            raise DamageError(file, "its numbers cannot be those of a lease", "lease")
        return Holder(**raw)

    def has_ended(self) -> bool:
        """Whether the process is known to be gone: it ran on this system, and its pid is free or was reused."""
        if [self.boot_id, self.pid_namespace] != host_identity() or process_start(str(self.pid)) == self.pid_start:
            return False
        try:
            os.kill(self.pid, 0)
        except PermissionError:  # another user's process, whose /proc entry may be hidden
            return False
        except ProcessLookupError:
            pass
        return True

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (lease {self.token}, {self.counter} heartbeats)"


@dataclass(frozen=True)
class LeaseState:
    """A lease file as read at one instant.

    Attributes:
        data: its first bytes, compared to detect a heartbeat; empty if it is not a regular file.
        holder: its content; None if it is damaged.
        problem: what is damaged, else empty.
    """

    path: Path
    token: int
    data: bytes
    holder: Holder | None
    problem: str = ""

    def __str__(self) -> str:
        return str(self.holder) if self.holder else f"an unknown process: {self.path.name} is damaged ({self.problem})"


def read_lease(directory: Path) -> LeaseState | None:
    """Reads the lease with the highest token; returns None if no process holds the directory."""
    names = sorted(filter(NAME.fullmatch, os.listdir(directory)), reverse=True)
    states = (read_lease_file(directory / name) for name in names)
    return next((state for state in states if state is not None), None)


def read_lease_file(path: Path) -> LeaseState | None:
    """Reads one lease file; returns None if it does not exist."""
    data = b""
    try:
        with open_regular(path) as (descriptor, size):
            data = read_bytes(descriptor, path.name, 0, min(size, _SIZE_LIMIT))
        if size > _SIZE_LIMIT:
            raise DamageError(path.name, f"{size} bytes are too many for a lease", "lease")
        return LeaseState(path, _token(path.name), data, Holder.decode(data, path.name))
    except DamageError as damage:
        return None if damage.tag == "missing" else LeaseState(path, _token(path.name), data, None, damage.reason)


def path_of(directory: Path, token: int) -> Path:
    return directory / f"lease-{token:08d}.json"


def _token(name: str) -> int:
    return int(name.removeprefix("lease-").removesuffix(".json"))
