"""Time and memory of work on a device, measured, and the libraries that drive it."""

from __future__ import annotations

import ctypes
import gc
import math
import re
import resource
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_STATUS = Path("/proc/self/status")
_MAPS = Path("/proc/self/maps")
_LAST_WITHOUT_ATTENTION = 91500  # cuDNN that PyTorch does not prefer, because it computes some lengths wrongly
_LEAST_MS = {"cuda": 2.0, "cpu": 5.0}  # shorter intervals measure the launch and the clock


def synchronize(device: torch.device) -> None:
    """Waits until ``device`` has done all that was launched; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def elapsed_ms(run: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """Returns the milliseconds of one call of ``run``, the mean of ``calls``: by events on a GPU, else by the clock."""
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        return 1000 * (time.perf_counter() - begin) / calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    with torch.cuda.device(device):  # whose stream the events belong to
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / calls


def repeated_ms(
    run: Callable[[], object], device: torch.device, rounds: int = 10, budget_s: float = 1.0
) -> list[float]:
    """Returns the milliseconds of one call of ``run`` in each of ``rounds`` rounds, after two calls to warm up.

    A round calls it several times if it is short. There are fewer rounds, at least three, if they would take longer
    than ``budget_s``.
    """
    run()
    first = elapsed_ms(run, device)
    calls = max(1, math.ceil(_LEAST_MS[device.type] / max(first, 1e-3)))
    rounds = min(rounds, max(3, int(1000 * budget_s / (first * calls))))
    return [elapsed_ms(run, device, calls) for _ in range(rounds)]


def alternating_ms(
    runs: Mapping[str, Callable[[], object]], device: torch.device, rounds: int, *, calls: int = 1, warmup: int = 1
) -> dict[str, list[float]]:
    """Returns the milliseconds of a call of each of ``runs`` by round, so that noise of the machine meets all of them.

    Args:
        runs: called in this order in each round.
        device: on which they compute.
        rounds: that count.
        calls: of each one in a round; their mean counts.
        warmup: rounds before them that do not count.
    """
    ms: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(-warmup, rounds):
        for name, run in runs.items():
            elapsed = elapsed_ms(run, device, calls)
            if number >= 0:
                ms[name].append(elapsed)
    return ms


def free_memory(device: torch.device) -> None:
    """Gives back the memory of engines that nothing refers to but themselves: they have cycles through their hooks."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


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


class PeakMemory:
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

    def total(self, foreign: int = 0) -> int | None:
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


class TensorBytes:
    """Counts the bytes of tensors beside those at its start, with the temporaries of kernels.

    On a CPU the profiler counts them, which takes time, and does not see that earlier tensors are freed.

    Attributes:
        peak: most bytes at one time.
        kept: bytes at the end.
    """

    def __init__(self, device: torch.device) -> None:
        self.peak = self.kept = 0
        self._device = device
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> TensorBytes:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        else:
            self._profile.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(self._device) - self._before
            self.kept = torch.cuda.memory_allocated(self._device) - self._before
            return
        self._profile.stop()
        profiler: Any = self._profile.profiler
        changes = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
        changes.sort(key=lambda event: event.start_ns())
        sums = [0, *accumulate(event.nbytes() for event in changes)]
        self.peak, self.kept = max(sums), sums[-1]


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


def loaded_library(stem: str) -> str | None:
    """Returns the file of the first library in this process whose name starts with ``stem``: ``libcudnn.so``."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        columns = line.split(maxsplit=5)  # address, permissions, offset, device, inode, file
        if len(columns) == 6 and columns[5].rpartition("/")[2].startswith(stem):
            return columns[5].removesuffix(" (deleted)")
    return None


def cublaslt_version() -> str | None:
    """Returns the version of the cuBLASLt in this process, such as ``13.1.0``, or None if none is loaded."""
    file = loaded_library("libcublasLt.so")
    if file is None:
        return None
    try:
        ask = ctypes.CDLL(file).cublasLtGetVersion
    except (OSError, AttributeError):
        return None
    ask.argtypes, ask.restype = [], ctypes.c_size_t
    return dotted_version(int(ask()))


def dotted_version(number: int) -> str:
    """Returns ``13.1.0`` for 130100, the form of cuBLASLt 12 and later and of cuDNN 9."""
    return f"{number // 10_000}.{number % 10_000 // 100}.{number % 100}"


def describe_cudnn(capability: tuple[int, int]) -> tuple[str, list[str]]:
    """Returns version and file of the cuDNN in this process, and warnings on what is wrong with it.

    Args:
        capability: of the GPU whose attention it may compute, unless algorithms must be deterministic.
    """
    file = loaded_library("libcudnn.so")
    try:
        number = torch.backends.cudnn.version()
    except RuntimeError as error:  # the loaded library is older than the one that PyTorch was built with
        reason = f"no: {str(error).splitlines()[0]}"
        return reason, [f"cuDNN: {reason}, {file or 'unknown file'}; remove it from the library path"]
    if number is None:
        return "none", []
    text, problems = f"{dotted_version(number)}, {file or 'unknown file'}", []
    own = _folders_of_cudnn()
    # it loads its parts at their first use, perhaps from another folder
    for each in dict.fromkeys(filter(None, (file, loaded_library("libcudnn_")))):
        if own and not any(Path(each).resolve().is_relative_to(folder) for folder in own):
            problems.append(
                f"cuDNN is loaded from {each} and not from PyTorch's wheels, {own[0]}; take its folder out of the "
                f"library path (LD_LIBRARY_PATH)"
            )
    compiled = getattr(getattr(torch._C, "_cudnn", None), "getCompileVersion", None)
    if compiled is not None and number < (built := sum(map(mul, compiled(), (10_000, 100, 1)))):
        problems.append(
            f"cuDNN {dotted_version(number)} is older than {dotted_version(built)}, with which PyTorch was built; "
            f"install that"
        )
    takes_attention = capability == (9, 0) and not torch.are_deterministic_algorithms_enabled()
    if number <= _LAST_WITHOUT_ATTENTION and takes_attention:
        problems.append(
            f"cuDNN {dotted_version(number)}: PyTorch takes cuDNN's attention from 9.15.1 on, and FlashAttention 2 "
            f"before, which has half its speed on an H100 (published: 306 for 566 TFLOP/s forward); install a newer "
            f"nvidia-cudnn"
        )
    return text, problems


def _folders_of_cudnn() -> list[Path]:
    """Returns where wheels have installed cuDNN."""
    with suppress(ImportError):  # there is no package nvidia
        spec = find_spec("nvidia.cudnn")
        if spec is not None:
            return [Path(folder).resolve() for folder in spec.submodule_search_locations or ()]
    return []
