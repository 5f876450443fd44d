"""Peak memory of this process on its device, read without waiting for the device."""

from __future__ import annotations

import ctypes
import re
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def peak_memory(device: torch.device) -> int:
    """Returns the most bytes so far: of torch's tensors on a GPU, of the resident process on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident()


def peak_resident() -> int:
    """Returns bytes. Not by ``getrusage`` on Linux, which includes the parent's memory at this process's start."""
    peak = _status("VmHWM")
    if peak is not None:
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _status(name: str) -> int | None:
    """Returns a size in Linux's ``/proc/self/status`` in bytes; None on other systems."""
    if not _STATUS.exists():
        return None
    found = re.search(rf"^{name}:\s*(\d+) kB$", _STATUS.read_text(encoding="ascii"), re.M)
    return int(found[1]) * 1024 if found else None


def _return_free_memory() -> None:
    """Gives back what malloc keeps free: memory that is taken from it later would not be growth."""
    with suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


class PeakMeter:
    """Measures the peak from now on: of the device's memory on a GPU, of the growth of this process on a CPU.

    The peaks above start again here.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        _return_free_memory()
        with suppress(OSError):  # on other systems than Linux
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # proc(5): VmHWM starts again
        self._start = _status("VmRSS")

    def peak(self, foreign: int) -> int | None:
        """Returns the bytes; None if this system does not say.

        Args:
            foreign: resident bytes of other ranks' memory, which is theirs.
        """
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            # of the driver, of kernels and of NCCL; other processes on the device count too
            others = max(total - free - torch.cuda.memory_reserved(self._device), 0)
            return int(torch.cuda.max_memory_reserved(self._device) + others)
        high = _status("VmHWM")
        return None if high is None or self._start is None else high - self._start - foreign
