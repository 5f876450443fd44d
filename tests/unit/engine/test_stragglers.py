"""Comparison of the ranks' busy times."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dtrain.distributed.progress import Phase
from dtrain.distributed.schedule import CollectiveSchedule
from dtrain.engine.parts import stragglers
from dtrain.engine.parts.stragglers import PHASES, BusyMeter


class Ranks:
    """A communicator whose gathers return what the test gives."""

    def __init__(self, world_size: int, device: str = "cpu", rank: int = 0) -> None:
        self.world_size, self.rank, self.device = world_size, rank, torch.device(device)
        self.schedule = CollectiveSchedule()
        self.rows: list[list[float]] = []
        self.gathers = 0

    def gather_rows(self, row: Tensor, *, label: str) -> Tensor:
        self.gathers += 1
        return torch.tensor(self.rows, dtype=torch.float64)


def meter(ranks: Any, every: int = 5) -> BusyMeter:
    built = BusyMeter(ranks, PHASES)
    built.every = every
    return built


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("dtrain.distributed.progress.perf_counter", lambda: now[0])
    return now


def run_step(comm: Any, clock: list[float], times: dict[Phase, float], wait: float) -> None:
    for phase, seconds in times.items():
        comm.schedule.progress.begin(phase)
        clock[0] += seconds / 2
        comm.schedule.progress.enter(1, "vote")
        clock[0] += wait
        comm.schedule.progress.leave(1)
        clock[0] += seconds / 2
    comm.schedule.progress.begin(Phase.DATA)


def test_the_window_has_the_time_without_waits_evaluations_and_saves(clock: list[float]) -> None:
    ranks = Ranks(2)
    busy = meter(ranks)
    times = {Phase.DATA: 1.0, Phase.FORWARD: 2.0, Phase.BACKWARD: 3.0, Phase.UPDATE: 4.0}
    for step in range(10):
        run_step(ranks, clock, {**times, Phase.EVALUATION: 100.0, Phase.SAVE: 50.0}, wait=7.0)
        assert busy._end(step) == (50.0 if step in (4, 9) else 0.0)
    for ranks, every in ((Ranks(1), 5), (Ranks(2), 0)):  # a single rank and no window compare nothing
        busy = meter(ranks, every)
        run_step(ranks, clock, {Phase.FORWARD: 1.0}, wait=0.0)
        assert [busy._end(step) for step in range(10)] == [0.0] * 10


@pytest.mark.parametrize(("ratio", "world_size"), [(1.0, 2), (1.19, 3), (1.21, 4), (2.0, 2), (1.21, 8)])
def test_a_rank_above_the_limit_is_named_with_its_phase(
    ratio: float, world_size: int, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Ranks(world_size)
    slow = world_size - 2
    busy = meter(ranks)
    for step in range(5):
        run_step(ranks, clock, {Phase.FORWARD: 1.0, Phase.BACKWARD: 1.0}, wait=3.0)
        seconds = busy._end(step)
    totals = [ratio * seconds if rank == slow else seconds for rank in range(world_size)]
    # all of the difference is in forward, although backward is longer
    ranks.rows = [[0.0, 3.0 + total - seconds, 7.0, 0.0] for total in totals]
    with caplog.at_level(logging.WARNING):
        busy._compare(4, totals)
    assert busy.latest.median_ms == pytest.approx(2000)
    assert busy.latest.slowest_ms == pytest.approx(2000 * ratio)
    assert busy.latest.spread_ms == pytest.approx(2000 * (ratio - 1))
    is_slow = ratio > 1.2
    assert ranks.gathers == is_slow
    assert busy.latest.phase == (Phase.FORWARD if is_slow else None)
    assert (f"slow rank: rank {slow} was busy" in caplog.text) == is_slow
    assert ("most of the difference in forward" in caplog.text) == is_slow
    assert not is_slow or busy.latest.slowest_rank == slow


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_names_a_slow_rank_once(clock: list[float], caplog: pytest.LogCaptureFixture, rank: int) -> None:
    ranks = Ranks(2, rank=rank)
    busy = meter(ranks)
    busy._compare(3, [0.0, 0.0])
    assert busy.latest is None, "within a window nothing is compared"
    ranks.rows = [[1.0, 0.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0]]
    run_step(ranks, clock, {Phase.DATA: 1.0}, wait=0.0)
    for step in range(5):
        busy._end(step)
    for seconds in ([1.0, 2.0], [1.0, 2.0], [1.0, 1.1], [1.0, 2.0]):
        busy._compare(4, seconds)
    assert caplog.text.count("slow rank") == (2 if rank == 0 else 0)
    assert busy.latest.slowest_rank == 1


class Device:
    """A GPU on which each step of ``gpu_step`` is busy for 15 ms; what the host launches happens later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.finished = 0.0, 0.0  # ms; until the second the device has come
        self.events = 0
        device = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing
                device.events += 1

            def record(self) -> None:
                self.at = device.now

            def elapsed_time(self, other: Event) -> float:
                if max(self.at, other.at) > device.finished:
                    raise RuntimeError("CUDA error: device not ready")
                return other.at - self.at

        monkeypatch.setattr(stragglers.torch, "cuda", SimpleNamespace(Event=Event))


def gpu_step(step: int, busy: BusyMeter, ranks: Any, device: Device) -> tuple[bool, float]:
    """Returns whether the step was recorded, and the busy seconds of the window that it ends."""
    progress = ranks.schedule.progress
    busy._begin(step)
    device.finished = device.now  # the decision of the step before is read
    for phase, ms in ((Phase.DATA, 1), (Phase.FORWARD, 2), (Phase.BACKWARD, 4), (Phase.UPDATE, 8)):
        progress.begin(phase)
        progress.enter(1, "unshard")
        device.now += 1000  # waits for the others
        progress.leave(1)
        device.now += ms
    is_recorded = progress.on_mark is not None
    seconds = busy._end(step)
    device.now += 5000  # the vote and the update
    progress.begin(Phase.DATA)
    return is_recorded, seconds


@pytest.mark.parametrize("every", [1, 3, 8, 20])
def test_a_gpu_is_timed_by_events_in_every_fifth_step(monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    """Not in one that ends a window: its events may not have happened yet, and CUDA refuses to time them."""
    device, ranks = Device(monkeypatch), Ranks(2, "cuda")
    ranks.schedule.progress.busy_s = [1e6] * len(Phase)  # of the host, which has worked before
    busy = meter(ranks, every)
    for step in range(100):
        is_recorded, seconds = gpu_step(step, busy, ranks, device)
        assert is_recorded == (step % 5 == 2 and (step + 1) % every != 0)
        if seconds:
            busy._compare(step, [seconds, seconds])
            assert busy.latest.median_ms == pytest.approx(15)
    assert (busy.latest is None) == (every == 1)


def test_a_gpu_records_nothing_if_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    for world_size, every in ((1, 20), (2, 0)):
        device, ranks = Device(monkeypatch), Ranks(world_size, "cuda")
        busy = meter(ranks, every)
        for step in range(20):
            gpu_step(step, busy, ranks, device)
        assert device.events == 0
    for every in (0, 3):  # changed by the program in a recorded step
        device, ranks = Device(monkeypatch), Ranks(2, "cuda")
        busy = meter(ranks)
        busy._begin(2)
        busy.every = every
        assert busy._end(2) == 0.0
        assert ranks.schedule.progress.on_mark is None
        assert [gpu_step(step, busy, ranks, device)[1] for step in (3, 4)] == [0.0, 0.0]
