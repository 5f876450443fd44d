"""Hosts made of Linux namespaces: each has its own network, name, processes, ``/dev/shm`` and ``/tmp``.

They share the file system otherwise, as nodes of a cluster share a folder. Nothing has a name outside: all of it
is gone when the first process of each namespace has ended, and those end with the process that has made the hosts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path

from tests.helpers.launch import PATIENCE, ROOT, Job

INTERFACE = "eth0"
"""The network interface of a host."""
REQUIRED = "DTRAIN_TEST_HOSTS"
"""Environment variable that turns a skip of the tests on several hosts into a failure."""
_NETWORK = "10.213.77"  # exists in these namespaces only
_NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
# the first process of a host reaps the others, as an init does, and ends all of them with itself
_IDLE = "echo ready; while :; do sleep 1000; done"


class Host:
    """A host; ``address`` is its IPv4 address on ``INTERFACE``, ``init`` its first process, as the tests see it."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.name = f"host{number}"
        self.address = f"{_NETWORK}.{number + 1}"
        self._unshare: subprocess.Popen[str] | None = None
        self.init = 0
        self._network = -1
        self._port = ""

    @property
    def address_in_proc(self) -> str:
        """The address as ``/proc/net/tcp`` has it."""
        return bytes(map(int, self.address.split(".")[::-1])).hex().upper()

    @property
    def is_up(self) -> bool:
        return self._unshare is not None

    def start(self, setup: str) -> None:
        """Starts the first process, which runs the commands of ``setup``; the network has no link yet."""
        self._unshare, self.init = _start([*_NAMESPACES, "--mount-proc"], f"hostname {self.name}\n{setup}")
        # a host's kernel outlives its processes: it still sends the ends of their connections
        self._network = os.open(f"/proc/{self.init}/ns/net", os.O_RDONLY)

    def connect(self, switch: int) -> None:
        """Connects the host to the bridge in the network of the process ``switch``."""
        if self._port:  # the old network lives on for a moment, and would answer in place of this one
            with suppress(RuntimeError):  # it has gone
                _ip(switch, "link", "del", self._port)
        self._port = f"p{self.init}"
        # the same hardware address each time, which the others remember for a minute
        peer = ("name", INTERFACE, "address", f"02:00:00:00:00:{self._number:02x}", "netns", str(self.init))
        _ip(switch, "link", "add", self._port, "type", "veth", "peer", *peer)
        _ip(switch, "link", "set", self._port, "master", "br0", "up")
        _ip(self.init, "link", "set", "lo", "up")
        _ip(self.init, "addr", "add", f"{self.address}/24", "dev", INTERFACE)
        _ip(self.init, "link", "set", INTERFACE, "up")

    def job(self, folder: Path, *command: str, env: Mapping[str, str] | None = None) -> Job:
        """Runs a command on this host, with ``folder`` as working directory and for its log."""
        return Job([*self.enter(), "sh", "-c", 'cd "$0" && exec "$@"', str(folder), *command], folder, env)

    def enter(self) -> list[str]:
        """Returns the beginning of a command line that runs the rest of it on this host."""
        return ["nsenter", f"--target={self.init}", *_NAMESPACES, "--"]

    def processes(self) -> set[int]:
        """Returns the processes of this host, as the tests see them, without those that keep it up."""
        namespace, found = os.readlink(f"/proc/{self.init}/ns/pid"), set()
        for entry in Path("/proc").iterdir():
            with suppress(OSError, IndexError):  # no process, or gone
                if entry.name.isdigit() and os.readlink(entry / "ns/pid") == namespace:
                    parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                    name = (entry / "comm").read_text().strip()
                    if int(entry.name) != self.init and (name, int(parent)) != ("sleep", self.init):
                        found.add(int(entry.name))
        return found

    def listening(self) -> set[str]:
        """Returns ``address:port`` of all that listens here, IPv4 and IPv6 as hexadecimal digits."""
        return {line[1] for line in self.sockets() if line[3] == "0A"}

    def sockets(self) -> list[list[str]]:
        """Returns the fields of the TCP sockets here, as ``/proc/net/tcp`` has them: 1 address, 3 state, 9 inode."""
        return [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{self.init}/net/{name}").open()]

    def unplug(self) -> None:
        """Ends the network of this host: no packet leaves or arrives."""
        _ip(self.init, "link", "set", INTERFACE, "down")

    def kill(self) -> None:
        """Ends all processes of this host at once, by SIGKILL."""
        if self._unshare is None:
            return
        os.kill(self.init, signal.SIGKILL)  # the kernel ends a namespace with its first process
        self._unshare.wait(PATIENCE)
        for pipe in (self._unshare.stdout, self._unshare.stderr):
            pipe.close()  # type: ignore[union-attr]
        self._unshare = None
        os.close(self._network)


class Hosts:
    """Hosts on one network, which end with the ``with`` block; ``shared`` gets their ``/etc/hosts``."""

    def __init__(self, number: int, shared: Path) -> None:
        self.shared = shared
        self._hosts = [Host(index) for index in range(number)]
        self._switch = 0
        self._stack = ExitStack()

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    def start(self) -> None:
        """Starts the hosts that are not up."""
        for host in self._hosts:
            if not host.is_up:
                host.start(self._setup())
                host.connect(self._switch)

    def _setup(self) -> str:
        """Returns the commands that give a host its own files."""
        # what the tests need stays visible even if it lies under /tmp, which is hidden
        under_tmp = {str(path) for path in (self.shared, ROOT, Path(sys.prefix)) if path.is_relative_to("/tmp")}
        lines = ["mount -t tmpfs none /mnt", "mount -t tmpfs none /dev/shm"]
        lines += [f"mkdir /mnt/{i} && mount --bind '{path}' /mnt/{i}" for i, path in enumerate(sorted(under_tmp))]
        lines += ["mount -t tmpfs none /tmp"]
        lines += [f"mkdir -p '{path}' && mount --move /mnt/{i} '{path}'" for i, path in enumerate(sorted(under_tmp))]
        return "\n".join([*lines, "umount /mnt", f"mount --bind '{self.shared}/etc-hosts' /etc/hosts"])

    def __enter__(self) -> Hosts:
        names = [f"{host.address} {host.name}" for host in self._hosts]
        (self.shared / "etc-hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]), encoding="ascii")
        with ExitStack() as stack:
            switch, self._switch = _start(["--net", "--mount", "--pid", "--mount-proc"], "")
            stack.callback(switch.wait)
            stack.callback(os.kill, self._switch, signal.SIGKILL)
            _ip(self._switch, "link", "add", "br0", "type", "bridge")
            _ip(self._switch, "link", "set", "br0", "up")
            for host in self._hosts:
                stack.callback(host.kill)
            self.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


@cache
def unsupported_reason() -> str:
    """Returns why hosts cannot be made here, or nothing."""
    try:
        process, pid = _start([*_NAMESPACES, "--mount-proc"], "mount -t tmpfs none /tmp")
        try:
            _ip(pid, "link", "add", "br0", "type", "bridge")
            _ip(pid, "link", "add", "v0", "type", "veth", "peer", "name", "v1")
        finally:
            os.kill(pid, signal.SIGKILL)
            process.wait()
    except (OSError, RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
        if os.environ.get(REQUIRED):
            raise
        return f"network namespaces need root, iproute2 and util-linux: {error}"
    return ""


def _start(namespaces: Sequence[str], setup: str) -> tuple[subprocess.Popen[str], int]:
    """Starts a process in new namespaces; returns the one that waits for it, and its number."""
    # both end with their parents, so that nothing is left if this process is killed
    unshare = ("setpriv", "--pdeathsig=KILL", "unshare", *namespaces)
    process = subprocess.Popen(
        [*unshare, "--fork", "--kill-child", "sh", "-ec", f"{setup}\n{_IDLE}"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    if process.stdout.readline() != "ready\n":
        process.kill()
        raise RuntimeError(f"unshare failed: {process.stderr.read().strip()}")
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return process, int(child)


def _ip(pid: int, *arguments: str) -> None:
    """Runs ``ip`` in the network of a process."""
    command = ["nsenter", f"--target={pid}", "--net", "ip", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if result.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {result.stderr.strip()}")


def wait_for(path: Path, timeout: float = PATIENCE) -> None:
    """Waits until a file exists."""
    deadline = time.monotonic() + timeout
    while not path.exists():
        assert time.monotonic() < deadline, f"there is no {path}"
        time.sleep(0.02)
