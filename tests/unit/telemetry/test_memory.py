from __future__ import annotations

import mmap
import sys
from types import SimpleNamespace

import pytest
import torch

from dtrain.telemetry import memory
from dtrain.telemetry.memory import peak_memory, peak_resident


def test_the_peak_grows_with_what_is_touched_and_stays() -> None:
    size = peak_memory(torch.device("cpu")) + (64 << 20)  # more than this process ever had
    held = mmap.mmap(-1, size)
    held[:: mmap.PAGESIZE] = bytes(len(range(0, size, mmap.PAGESIZE)))  # a byte of each page
    grown = peak_memory(torch.device("cpu"))
    assert grown > 0.99 * size
    held.close()
    assert peak_memory(torch.device("cpu")) > 0.99 * grown  # the kernel adds up counters of all CPUs without a lock


@pytest.mark.parametrize(("platform", "unit"), [("darwin", 1), ("freebsd14", 1024)])
def test_without_proc_the_unit_is_the_systems(monkeypatch: pytest.MonkeyPatch, platform: str, unit: int) -> None:
    monkeypatch.setattr(memory, "_STATUS", SimpleNamespace(exists=lambda: False))
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(memory.resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=1000))
    assert peak_resident() == 1000 * unit


def test_on_a_gpu_the_allocator_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", {torch.device("cuda", 1): 7}.__getitem__)
    assert peak_memory(torch.device("cuda", 1)) == 7
