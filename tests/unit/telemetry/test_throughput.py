from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from dtrain.telemetry.throughput import StepTimer, device_name, mfu


def test_half_the_peak_is_half() -> None:
    for device, precision, teraflops in (
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156.0),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("NVIDIA H100 80GB HBM3", "fp16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA H200", "bf16", 989.4),
    ):
        assert mfu(device, precision, teraflops * 1e12 / 2) == pytest.approx(0.5)
    for unknown in ("cpu", "NVIDIA H200 MIG 1g.18gb", "NVIDIA H100", "nvidia h200"):
        assert mfu(unknown, "bf16", 1e12) is None
    assert mfu("NVIDIA H200", "fp8", 1e12) is None  # products are of several formats
    assert device_name(torch.device("cpu")) == "cpu"


def test_pauses_do_not_count_and_the_first_step_is_separate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    timer = StepTimer()
    clock.now += 8.0  # compiles
    timer.step_done(100, 0.5)
    assert timer.total().step_s == 8.0
    with timer.paused():
        clock.now += 50.0
    clock.now += 1.0
    timer.step_done(10, 0.25)
    clock.now += 2.0
    timer.step_done(20, 0.5)
    window, total = timer.window(), timer.total()
    assert (window.steps, window.tokens, window.waited_s) == (3, 130, 1.25)
    assert (total.step_s, total.tokens_per_s, total.data_wait_ms) == (1.5, 10.0, 375.0)
    clock.now += 4.0
    timer.step_done(0, 0.0)
    window = timer.window()
    assert (window.steps, window.step_s) == (1, 4.0)
    empty = timer.window()
    assert (empty.step_s, empty.tokens_per_s, empty.data_wait_ms) == (0.0, 0.0, 0.0)
