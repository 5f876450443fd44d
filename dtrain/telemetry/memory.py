"""Peak memory of this process on its device, read without waiting for the device."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def peak_memory(device: torch.device) -> int:
    """Returns the most bytes so far: of torch's tensors on a GPU, of the resident process on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident()


def peak_resident() -> int:
    """Returns bytes. Not by ``getrusage`` on Linux, which includes the parent's memory at this process's start."""
    if _STATUS.exists():
        line = next(line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
