"""Times and peaks of work on a device."""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from dtrain import device as memory
from dtrain.device import (
    TensorBytes,
    alternating_ms,
    cublaslt_version,
    elapsed_ms,
    loaded_library,
    peak_memory,
    peak_resident,
    repeated_ms,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands still, in seconds."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def test_a_time_is_the_mean_of_calls(clock: SimpleNamespace) -> None:
    taken = iter((1.0, 2.0, 6.0))

    def run() -> None:
        clock.now += next(taken)

    assert elapsed_ms(run, CPU, 3) == 3000.0


def test_rounds_are_in_turn_and_the_first_does_not_count(clock: SimpleNamespace) -> None:
    order: list[str] = []

    def run(name: str, seconds: float) -> None:
        order.append(name)
        clock.now += seconds * len(order)

    ms = alternating_ms({"a": lambda: run("a", 1.0), "b": lambda: run("b", 0.5)}, CPU, 2)
    assert "".join(order) == "ababab"
    assert ms == {"a": [3000.0, 5000.0], "b": [2000.0, 3000.0]}


@pytest.mark.parametrize(("seconds", "rounds", "calls"), [(0.001, 10, 5), (0.0004, 10, 13), (0.4, 3, 1), (9.0, 3, 1)])
def test_what_is_short_is_repeated_and_what_is_long_has_few_rounds(
    clock: SimpleNamespace, seconds: float, rounds: int, calls: int
) -> None:
    begins: list[float] = []

    def run() -> None:
        begins.append(clock.now)
        clock.now += seconds

    assert repeated_ms(run, CPU) == pytest.approx([1000 * seconds] * rounds)
    assert len(begins) - 2 == pytest.approx(rounds * calls, abs=rounds)


def test_the_peak_grows_with_what_is_touched_and_stays() -> None:
    size = peak_memory(CPU) + (64 << 20)  # more than this process ever had
    held = mmap.mmap(-1, size)
    held[:: mmap.PAGESIZE] = bytes(len(range(0, size, mmap.PAGESIZE)))  # a byte of each page
    grown = peak_memory(CPU)
    assert grown > 0.99 * size
    held.close()
    assert peak_memory(CPU) > 0.99 * grown  # the kernel adds up counters of all CPUs without a lock


@pytest.mark.parametrize(("platform", "unit"), [("darwin", 1), ("freebsd14", 1024)])
def test_without_proc_the_unit_is_the_systems(monkeypatch: pytest.MonkeyPatch, platform: str, unit: int) -> None:
    monkeypatch.setattr(memory, "_STATUS", SimpleNamespace(exists=lambda: False))
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(memory.resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=1000))
    assert peak_resident() == 1000 * unit


def test_on_a_gpu_the_allocator_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", {GPU: 7}.__getitem__)
    assert peak_memory(GPU) == 7


def test_bytes_of_tensors_on_a_gpu_are_the_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(now=100, peak=400)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: cuda.now)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: cuda.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: setattr(cuda, "peak", cuda.now))
    with TensorBytes(GPU) as found:
        cuda.now, cuda.peak = 120, 150
    assert (found.peak, found.kept) == (50, 20)


def test_on_a_cpu_what_is_freed_inside_counts_at_the_peak() -> None:
    before, low = torch.zeros(1000), torch.zeros(1000, dtype=torch.bfloat16)
    with TensorBytes(torch.device("cpu")) as found:
        freed = torch.zeros(3000)
        del freed
        kept = before + 1
    assert (found.peak, found.kept) == (12_000, kept.nbytes)
    with TensorBytes(torch.device("cpu")) as found:
        low.add_(kept)
    assert found.peak >= 4000, "the kernel casts"
    assert found.kept == 0


def test_a_loaded_library_is_found_by_the_start_of_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if sys.platform == "linux":
        own = Path(torch.__file__).parent / "lib/libtorch_cpu.so"
        assert Path(loaded_library("libtorch_cpu.so") or "").samefile(own)
    maps = tmp_path / "maps"
    monkeypatch.setattr(memory, "_MAPS", maps)
    assert loaded_library("libcudnn.so") is None
    maps.write_text(
        "7f00-7f01 r--p 00000000 fe:00 1                 /libcudnn.so.1/other.so\n"
        "7f01-7f02 rw-p 00000000 00:00 0\n"
        "7f02-7f03 r--p 00000000 fe:00 2                 /opt/lib/libcudnn_ops.so.9\n"
        "7f03-7f04 r--p 00000000 fe:00 3                 /opt/my libs/libcudnn.so.9 (deleted)\n"
        "7f04-7f05 r-xp 00001000 fe:00 4                 /usr/lib/libcudnn.so.9\n",
        encoding="utf-8",
    )
    assert loaded_library("libcudnn.so") == "/opt/my libs/libcudnn.so.9"
    assert loaded_library("libcublasLt.so") is None


def test_the_version_of_cublaslt_is_asked_of_the_loaded_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    function = Mock(return_value=120804)
    broken = tmp_path / "libcublasLt.so.12"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(memory, "loaded_library", lambda stem: str(broken))
    assert cublaslt_version() is None
    libraries = {"/opt/libcublasLt.so.13": SimpleNamespace(cublasLtGetVersion=function)}
    monkeypatch.setattr(ctypes, "CDLL", libraries.__getitem__)
    monkeypatch.setattr(memory, "loaded_library", lambda stem: "/opt/libcublasLt.so.13" if "cublasLt" in stem else None)
    assert cublaslt_version() == "12.8.4"
    assert function.restype is ctypes.c_size_t
    assert [memory.dotted_version(number) for number in (130100, 91002)] == ["13.1.0", "9.10.2"]
    monkeypatch.setattr(memory, "loaded_library", lambda stem: None)
    assert cublaslt_version() is None


def test_a_cudnn_that_slows_attention_down_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another one on the library path, one older than PyTorch's, and one whose attention PyTorch does not take."""
    wheel, other = tmp_path / "nvidia/cudnn", tmp_path / "opt/libcudnn.so.9"
    own, found = wheel / "lib/libcudnn.so.9", SimpleNamespace(file="", number=92000, built=(9, 20, 0))
    spec = SimpleNamespace(submodule_search_locations=[str(wheel)])
    monkeypatch.setattr(memory, "find_spec", lambda name: spec)
    monkeypatch.setattr(memory, "loaded_library", lambda stem: str(found.file))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: found.number)
    compiled = SimpleNamespace(getCompileVersion=lambda: found.built)
    monkeypatch.setattr(torch._C, "_cudnn", compiled, raising=False)
    found.file = own
    assert memory.describe_cudnn((9, 0)) == (f"9.20.0, {own}", [])
    found.file = other
    _, (elsewhere,) = memory.describe_cudnn((9, 0))
    assert elsewhere.startswith(f"cuDNN is loaded from {other} and not from PyTorch's wheels, {wheel}; take")
    monkeypatch.setattr(memory, "find_spec", Mock(side_effect=ModuleNotFoundError("nvidia")))
    found.number = 91500
    _, (older, slow) = memory.describe_cudnn((9, 0))
    assert older == "cuDNN 9.15.0 is older than 9.20.0, with which PyTorch was built; install that"
    assert slow.startswith("cuDNN 9.15.0: PyTorch takes cuDNN's attention from 9.15.1 on")
    monkeypatch.delattr(torch._C, "_cudnn")
    assert memory.describe_cudnn((8, 0)) == (f"9.15.0, {other}", [])
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert memory.describe_cudnn((9, 0)) == (f"9.15.0, {other}", []), "cuDNN's attention is not asked for"
    monkeypatch.undo()
    libraries = {"libcudnn.so": str(own), "libcudnn_": str(other)}
    monkeypatch.setattr(memory, "find_spec", lambda name: spec)
    monkeypatch.setattr(memory, "loaded_library", libraries.get)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: found.number)
    found.number = 92000
    _, (part,) = memory.describe_cudnn((9, 0))
    assert part.startswith(f"cuDNN is loaded from {other} and not")
    monkeypatch.setattr(memory, "find_spec", lambda name: None)
    libraries |= {"libcudnn.so": str(other)}
    found.number = 91501
    assert memory.describe_cudnn((9, 0)) == (f"9.15.1, {other}", [])
    found.number = None
    assert memory.describe_cudnn((9, 0)) == ("none", [])
    refused = RuntimeError("cuDNN version incompatibility: compiled against (9, 20)\nmore")
    monkeypatch.setattr(torch.backends.cudnn, "version", Mock(side_effect=refused))
    reason = "no: cuDNN version incompatibility: compiled against (9, 20)"
    assert memory.describe_cudnn((9, 0)) == (reason, [f"cuDNN: {reason}, {other}; remove it from the library path"])
