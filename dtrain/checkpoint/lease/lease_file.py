"""The file that says which process may write in a directory of checkpoints: ``lease-00000001.json``.

The one with the highest number counts. It names its holder, who rewrites it with a counter one higher every few
seconds. What it says is a claim by whoever could write there: it is parsed strictly, and nothing but waiting follows
from one that is damaged.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dtrain.checkpoint.format.container import DamageError, open_regular, parse_json, read_bytes
from dtrain.distributed.peers import host_identity, process_start

NAME = re.compile(r"lease-([0-9]{8})\.json")
TEMPORARY = re.compile(r"lease-[0-9]{8}\.tmp-[0-9a-f]+")
LAST_TOKEN = 10**8 - 1
_SIZE_LIMIT = 4096  # bytes
_HOST = re.compile(r"[\w.-]{1,255}", re.ASCII)
_ID = re.compile(r"[0-9a-f]{32}")
_PID_LIMIT = 1 << 31
_WORD, _NUMBER, _UNKNOWN = (str,), (int,), (str, type(None))
_FIELDS: dict[str, tuple[type, ...]] = {
    "token": _NUMBER,
    "counter": _NUMBER,
    "id": _WORD,
    "host": _WORD,
    "boot_id": _UNKNOWN,
    "pid": _NUMBER,
    "pid_start": _UNKNOWN,
    "pid_namespace": _UNKNOWN,
}


@dataclass(frozen=True)
class Holder:
    """What a lease file says.

    Attributes:
        token: the number in the file's name; each takeover has a higher one.
        counter: signs of life so far.
        id: of this one taking, at random.
        host: its name, for people.
        boot_id: of the running system, None where it does not say.
        pid: the process.
        pid_start: when it started, in the kernel's ticks.
        pid_namespace: in which ``pid`` has its meaning.
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
        """A new holder."""
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

    def alive(self) -> Holder:
        """The same with one more sign of life."""
        return replace(self, counter=self.counter + 1)

    def encode(self) -> bytes:
        """The bytes of the file."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def decode(data: bytes, file: str) -> Holder:
        """Parses and checks the bytes of a lease file.

        Raises:
            DamageError: it is not one that this version writes.
        """
        raw = parse_json(data, file)
        typed = set(raw) == set(_FIELDS) and all(type(raw[name]) in kinds for name, kinds in _FIELDS.items())
        if not typed or not _ID.fullmatch(raw["id"]) or not _HOST.fullmatch(raw["host"]):
            raise DamageError(file, "its fields are not those of a lease", "lease")
        if raw["token"] != _token(file) or raw["counter"] < 0 or not 0 < raw["pid"] < _PID_LIMIT:
            raise DamageError(file, "its numbers cannot be those of a lease", "lease")
        return Holder(**raw)

    def has_ended(self) -> bool:
        """Whether the process is known to be gone: it ran on this very system, and its number is no longer its own."""
        if [self.boot_id, self.pid_namespace] != host_identity() or process_start(str(self.pid)) == self.pid_start:
            return False
        try:
            os.kill(self.pid, 0)
        except PermissionError:  # another user's process, which the system may hide
            return False
        except ProcessLookupError:
            pass
        return True

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (lease {self.token}, {self.counter} signs of life)"


@dataclass(frozen=True)
class LeaseState:
    """Who held a directory at one instant.

    Attributes:
        path: the lease file.
        token: the number in its name.
        data: its first bytes, to see whether they change; empty where it is no file.
        holder: what it says, None where it is damaged.
        problem: how, else empty.
    """

    path: Path
    token: int
    data: bytes
    holder: Holder | None
    problem: str = ""

    def __str__(self) -> str:
        return str(self.holder) if self.holder else f"nobody knows whom: {self.path.name} is damaged ({self.problem})"


def look(directory: Path) -> LeaseState | None:
    """Reads the lease that counts; None where nobody holds the directory.

    Raises:
        OSError: the directory cannot be listed, or the file not be read.
    """
    names = sorted(filter(NAME.fullmatch, os.listdir(directory)), reverse=True)
    sights = (look_at(directory / name) for name in names)
    return next((state for state in sights if state is not None), None)


def look_at(path: Path) -> LeaseState | None:
    """Reads one lease file; None where there is none.

    Raises:
        OSError: it cannot be read.
    """
    data = b""
    try:
        descriptor, size = open_regular(path)
        try:
            data = read_bytes(descriptor, path.name, 0, min(size, _SIZE_LIMIT))
        finally:
            os.close(descriptor)
        if size > _SIZE_LIMIT:
            raise DamageError(path.name, f"{size} bytes are too many for a lease", "lease")
        return LeaseState(path, _token(path.name), data, Holder.decode(data, path.name))
    except DamageError as damage:
        return None if damage.why == "missing" else LeaseState(path, _token(path.name), data, None, damage.reason)


def path_of(directory: Path, token: int) -> Path:
    """The lease file with this number."""
    return directory / f"lease-{token:08d}.json"


def _token(name: str) -> int:
    return int(name.removeprefix("lease-").removesuffix(".json"))
