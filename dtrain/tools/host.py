"""The facts about a machine that a measurement is worth nothing without; never its name."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass, field
from importlib.metadata import version as package_version
from importlib.util import find_spec
from pathlib import Path

import torch

from dtrain.telemetry.throughput import num_cores
from dtrain.version import version

_PEERS = ("accelerate", "deepspeed")
"""Packages that dtrain is measured against."""


@dataclass(frozen=True)
class Host:
    """The machine and the software, without its name.

    Attributes:
        peers: versions of the installed packages that dtrain is measured against.
    """

    cpu: str
    cores: int
    memory_gib: float
    gpus: list[str]
    system: str
    python: str
    torch: str
    dtrain: str
    peers: dict[str, str] = field(default_factory=dict)


def describe_host() -> Host:
    """This machine and its software."""
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


def memory_left() -> float:
    """The share of this machine's memory that new processes can have; 1 where the system does not say."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return 1.0
    facts = dict(re.findall(r"^(MemTotal|MemAvailable):\s*(\d+) kB$", meminfo.read_text(encoding="ascii"), re.M))
    return int(facts["MemAvailable"]) / int(facts["MemTotal"]) if len(facts) == 2 else 1.0


def _cpu_model() -> str:
    """The model name; where a virtual machine hides it, with family and model number."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor() or "unknown"
    facts = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", cpuinfo.read_text(encoding="utf-8"), re.M))
    if "model name" not in facts:
        return platform.processor() or "unknown"
    numbers = f" (family {facts['cpu family']}, model {facts['model']})" if "model" in facts else ""
    return f"{facts['model name']}{numbers}"
