"""Two or more hosts on which each launcher starts ranks."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from tests.helpers.hosts import INTERFACE, Host, Hosts, wait_for
from tests.helpers.launch import ROOT, SBATCH, Job, rank_variables, slurm_job, train_here, write_samples
from tests.helpers.ranks import fork
from tests.helpers.remote_shell import NODES, install

SCRIPT = str(ROOT / "launch/train.py")
_SERVE = (sys.executable, "-m", "tests.helpers.remote_shell", "serve")


class HostRank(Job):
    """``dtrain train ARGV`` on a host, forked from the fork server, so that it starts at once; ends with its host."""

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
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), 1)
    torch.set_num_threads(1)
    os._exit(train_here(argv, env, log))


class Cluster:
    """Hosts, a folder that they share, and ``ssh`` between them; ``data`` is the override that names data in it."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.shared = hosts.shared
        self.data = write_samples(self.shared)
        self._env = {**install(self.shared), "GLOO_SOCKET_IFNAME": INTERFACE}
        self._numbers = itertools.count(1)

    def folder(self) -> Path:
        """Returns a new folder in the shared one."""
        folder = self.shared / f"job{next(self._numbers)}"
        folder.mkdir()
        return folder

    @contextmanager
    def shells(self) -> Iterator[None]:
        """Answers ``ssh`` on every host until the block ends."""
        with ExitStack() as stack:
            for host in self.hosts:
                stack.enter_context(host.job(self.folder(), *_SERVE, env=self._env))
                wait_for(self.shared / f"{host.name}.sock")
            yield

    def ranks(self, *argv: str, per_host: int = 1, num_hosts: int = 0) -> list[HostRank]:
        """Forks ranks on the first hosts, without a launcher: each has the variables that torchrun would set."""
        env = {**self._env, "MASTER_ADDR": self.hosts[0].name, "MASTER_PORT": str(self._port())}
        ranks, world = [], per_host * (num_hosts or len(self.hosts))
        for rank in range(world):
            own = env | rank_variables(rank, world, per_host)
            ranks.append(HostRank(self.hosts[rank // per_host], self.folder() / "log", argv, own))
        return ranks

    def torchrun(self, *argv: str, per_host: int = 1) -> list[Job]:
        """Starts torchrun on each host; they meet by its c10d rendezvous."""
        endpoint = f"{self.hosts[0].name}:{self._port()}"
        options = [f"--nnodes={len(self.hosts)}", f"--nproc-per-node={per_host}", "--rdzv-backend=c10d"]
        options += [f"--rdzv-endpoint={endpoint}", "--rdzv-id=test"]
        command = (sys.executable, "-m", "torch.distributed.run", *options, SCRIPT, *argv)
        return [host.job(self.folder(), *command, env=self._env) for host in self.hosts]

    def deepspeed(self, *argv: str, per_host: int = 1) -> list[Job]:
        """Starts DeepSpeed's launcher on the first host, with a hostfile; its ``pdsh`` is a stand-in."""
        folder = self.folder()
        lines = [f"{host.name} slots={per_host}\n" for host in self.hosts]
        (folder / "hosts").write_text("".join(lines), encoding="ascii")
        (folder / ".deepspeed_env").write_text(f"GLOO_SOCKET_IFNAME={INTERFACE}\nOMP_NUM_THREADS=1\n", encoding="ascii")
        options = ["--hostfile", "hosts", "--master_port", str(self._port())]
        return [self.hosts[0].job(folder, "deepspeed", *options, SCRIPT, *argv, env=self._env)]

    def sbatch(self, *argv: str, per_host: int = 1) -> list[Job]:
        """Starts ``launch/slurm.sbatch`` on the first host; ``srun`` is a stand-in."""
        folder = self.folder()
        batch = slurm_job(folder, len(self.hosts), per_host * len(self.hosts))
        path = f"{folder / 'slurm'}{os.pathsep}{self._env['PATH']}"
        names = ",".join(host.name for host in self.hosts)
        return [self.hosts[0].job(folder, *SBATCH, *argv, env={**batch, **self._env, "PATH": path, NODES: names})]

    def _port(self) -> int:
        return 20000 + next(self._numbers)  # the network is the cluster's own


def ranks_on(host: Host, jobs: list[Job]) -> set[int]:
    """Returns the ranks that run on ``host``."""
    here = host.processes()
    return {rank for job in jobs for rank, pid in job.ranks().items() if pid in here}
