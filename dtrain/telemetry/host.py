"""Describes the machine and the software of a measurement, without the machine's name."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version as package_version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dtrain.distributed.startup.launch_env import num_cores
from dtrain.version import version

ENVIRONMENT_FILE = "environment.json"
_PEERS = ("accelerate", "deepspeed")
"""Packages that the benchmarks compare dtrain with."""


@dataclass(frozen=True)
class Host:
    """A machine and its software; ``peers`` are the installed packages that dtrain is measured against."""

    cpu: str
    cores: int
    memory_gib: float
    gpus: list[str]
    system: str
    python: str
    torch: str
    dtrain: str
    peers: dict[str, str] = field(default_factory=dict)

    def summary(self) -> str:
        gpus = "".join(f", {name}" for name in self.gpus)
        peers = "".join(f", {name} {number}" for name, number in self.peers.items())
        return (
            f"{self.cpu}, {self.cores} cores, {self.memory_gib:g} GiB{gpus}, {self.system}; Python {self.python}, "
            f"torch {self.torch}, dtrain {self.dtrain}{peers}"
        )


def describe_host() -> Host:
    import torch  # here, so that records of hosts are read without it

    return Host(
        cpu=_cpu_model(),
        cores=num_cores(),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        gpus=[torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=str(torch.__version__),
        dtrain=version(),
        peers={name: package_version(name) for name in _PEERS if find_spec(name) is not None},
    )


def environment(world_size: int) -> dict[str, Any]:
    """Returns machine, software and code of a run that starts now, without names of machine, user or folders."""
    return {
        **asdict(describe_host()),
        "world_size": world_size,
        "git_commit": _git_commit(),
        "started": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
    }


def _git_commit() -> str | None:
    """Returns the commit that is checked out in the working directory, or None; read without starting a process."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        git = folder / ".git"
        try:
            if git.is_file():  # of a worktree or a submodule
                git = folder / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
            head = (git / "HEAD").read_text(encoding="utf-8").strip()
            common = git / "commondir"
            shared = git / common.read_text(encoding="utf-8").strip() if common.is_file() else git
            name = head.removeprefix("ref: ")
            if name == head:
                return head
            if (shared / name).is_file():
                return (shared / name).read_text(encoding="utf-8").strip()
            packed = (shared / "packed-refs").read_text(encoding="utf-8")
            return next((line.split()[0] for line in packed.splitlines() if line.endswith(f" {name}")), None)
        except OSError:
            continue
    return None


def memory_left() -> float:
    """Returns the share of this machine's memory that new processes can have, or 1 if the system does not say."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return 1.0
    facts = dict(re.findall(r"^(MemTotal|MemAvailable):\s*(\d+) kB$", meminfo.read_text(encoding="ascii"), re.M))
    return int(facts["MemAvailable"]) / int(facts["MemTotal"]) if len(facts) == 2 else 1.0


def _cpu_model() -> str:
    """Returns the model name with family and number: a virtual machine may hide all but those."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor() or "unknown"
    facts = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", cpuinfo.read_text(encoding="utf-8"), re.M))
    if "model name" not in facts:
        return platform.processor() or "unknown"
    numbers = f" (family {facts['cpu family']}, model {facts['model']})" if "model" in facts else ""
    return f"{facts['model name']}{numbers}"
