"""Two or more hosts on which each launcher starts ranks."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.helpers.hosts import INTERFACE, Host, Hosts, wait_for
from tests.helpers.launch import ROOT, SBATCH, Job, slurm_job, write_samples
from tests.helpers.remote_shell import install
from tests.helpers.slurm import NODES

SCRIPT = str(ROOT / "launch/train.py")
_SERVE = (sys.executable, "-m", "tests.helpers.remote_shell", "serve")


class Cluster:
    """Hosts, a folder that they share, and ``ssh`` between them.

    Attributes:
        data: override that names data in the folder.
    """

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.shared = hosts.shared
        self.data = write_samples(self.shared)
        self._env = {**install(self.shared), "GLOO_SOCKET_IFNAME": INTERFACE}
        self._servers = ExitStack()
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

    def ranks(self, *argv: str, per_host: int = 1) -> list[Job]:
        """Starts the ranks without a launcher: each with the variables that torchrun would set."""
        port, jobs = str(self._port()), []
        for index, host in enumerate(self.hosts):
            for local_rank in range(per_host):
                env = {
                    "RANK": str(per_host * index + local_rank),
                    "WORLD_SIZE": str(per_host * len(self.hosts)),
                    "LOCAL_RANK": str(local_rank),
                    "LOCAL_WORLD_SIZE": str(per_host),
                    "MASTER_ADDR": self.hosts[0].name,
                    "MASTER_PORT": port,
                }
                command = (sys.executable, "-m", "dtrain", "train", *argv)
                jobs.append(host.job(self.folder(), *command, env={**self._env, **env}))
        return jobs

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


Launcher = Callable[..., list[Job]]


def ranks_on(host: Host, jobs: list[Job]) -> set[int]:
    """Returns the ranks that run on ``host``."""
    namespace = os.readlink(f"/proc/{host.init}/ns/pid")
    found = set()
    for job in jobs:
        for rank, pid in job.ranks().items():
            try:
                if os.readlink(f"/proc/{pid}/ns/pid") == namespace:
                    found.add(rank)
            except OSError:  # it has ended since
                continue
    return found
