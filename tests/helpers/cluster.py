"""Hosts on which ranks train."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from dtrain.__main__ import main
from tests.helpers.hosts import INTERFACE, Host, Hosts
from tests.helpers.launch import LAUNCHER, Job, write_samples
from tests.helpers.ranks import fork


class HostRank(Job):
    """A rank on a host, forked from the fork server, so that it starts at once; it ends with its host.

    Args:
        host: where it runs.
        log: gets its output.
        argv: of ``dtrain train``.
        env: added to the environment.
    """

    def __init__(self, host: Host, log: Path, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self.host = host
        self._log = log
        log.touch()
        self._rank = fork(_train_on, host.init, str(log), list(argv), dict(env))

    def exit_code(self) -> int | None:
        return self._rank.exitcode

    def kill(self) -> None:
        self._rank.kill()


def _train_on(init: int, log: str, argv: list[str], env: dict[str, str]) -> None:
    """Runs ``dtrain train`` in the namespaces of the process ``init``, and ends with its exit code."""
    gc.freeze()
    libc = ctypes.CDLL(None, use_errno=True)
    opened = [os.open(f"/proc/{init}/ns/{name}", os.O_RDONLY) for name in ("net", "uts", "ipc", "pid", "mnt")]
    for namespace in opened:
        if libc.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(namespace)
    child = os.fork()  # the first process in the namespace of processes
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256)
    for name in LAUNCHER:
        os.environ.pop(name, None)
    os.environ.update(env)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    code = main(["train", *argv])
    os._exit(code)


class Cluster:
    """Hosts and a folder that they share.

    Attributes:
        data: override that names data in the folder.
    """

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.shared = hosts.shared
        self.data = write_samples(self.shared)
        self._numbers = itertools.count(1)

    def folder(self) -> Path:
        """Returns a new folder in the shared one."""
        folder = self.shared / f"job{next(self._numbers)}"
        folder.mkdir()
        return folder

    def ranks(self, *argv: str, per_host: int = 1, num_hosts: int = 0) -> list[HostRank]:
        """Forks ranks on the first hosts, without a launcher: each has the variables that torchrun would set."""
        port, ranks = str(20000 + next(self._numbers)), []  # the network is the cluster's own
        num_hosts = num_hosts or len(self.hosts)
        for rank in range(per_host * num_hosts):
            env = {
                "RANK": str(rank),
                "WORLD_SIZE": str(per_host * num_hosts),
                "LOCAL_RANK": str(rank % per_host),
                "LOCAL_WORLD_SIZE": str(per_host),
                "MASTER_ADDR": self.hosts[0].name,
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": INTERFACE,
            }
            ranks.append(HostRank(self.hosts[rank // per_host], self.folder() / "log", argv, env))
        return ranks
