"""Runs of cases in turn: what is started when, with which micro-batch, and what is left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtrain.tools.accept.part import PartRequest
from dtrain.tools.accept.parts import interleaved
from dtrain.tools.accept.parts.case_worker import largest_fitting
from dtrain.tools.accept.parts.interleaved import CaseRun, InterleavedRuns, dtrain_case, error_lines, speed_ups
from dtrain.tools.accept.processes import Ended
from dtrain.tools.bench.records import BenchmarkCase
from tests.unit.tools.accept.parts.made import record

GIB = 2**30
DTRAIN, PEER = dtrain_case("dtrain"), BenchmarkCase("plain", "plain", 1, "bf16")


class Machine:
    """Stands in for the processes: each run takes ``seconds``, and fits up to ``memory`` sequences of its case."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float = 10.0, **memory: int) -> None:
        self.time, self.seconds, self.memory = 0.0, seconds, memory
        self.started: list[tuple[str, list[int]]] = []
        self.errors: dict[str, str] = {}
        monkeypatch.setattr(interleaved, "run_process", self._run)

    def _run(self, module: str, line: str, **limits: Any) -> Ended:
        job = json.loads(line)
        name, sizes = job["rank_job"]["case"]["name"], job["micro_batches"]
        self.started.append((name, sizes))
        self.time += self.seconds
        size = 4 if len(sizes) > 1 else sizes[0]
        error = self.errors.get(name, "")
        if size > self.memory.get(name, 8):
            error = "ended with exit code 1: OutOfMemoryError: CUDA out of memory."
        return Ended("" if error else json.dumps({"micro_batch": size}), self.seconds, error)


@pytest.fixture
def runs(tmp_path: Path) -> Callable[..., InterleavedRuns]:
    def make(machine: Machine, seconds: float = 1000.0) -> InterleavedRuns:
        request = PartRequest("cuda", seconds, False, str(tmp_path))
        return InterleavedRuns(request, now=lambda: machine.time)

    return make


def in_turn(count: int = 2, **changes: Any) -> list[CaseRun]:
    made = [CaseRun(case, "1.2B", number) for number in range(count) for case in (DTRAIN, PEER)]
    return [replace(run, **changes) for run in made]


def test_the_first_run_chooses_the_micro_batch_of_all(
    monkeypatch: pytest.MonkeyPatch, runs: Callable[..., InterleavedRuns]
) -> None:
    machine = Machine(monkeypatch)
    running = runs(machine)
    running.run(in_turn())
    assert machine.started == [("dtrain", [8, 6, 4, 3, 2, 1]), ("plain", [4]), ("dtrain", [4]), ("plain", [4])]
    assert running.micro_batch("1.2B") == 4
    assert running.results["left_out"] == {}


def test_a_case_without_memory_takes_a_smaller_micro_batch_and_keeps_it(
    monkeypatch: pytest.MonkeyPatch, runs: Callable[..., InterleavedRuns]
) -> None:
    machine = Machine(monkeypatch, plain=2)
    running = runs(machine)
    running.run(in_turn())
    assert [sizes for name, sizes in machine.started if name == "plain"] == [[4], [2], [2]]
    machine = Machine(monkeypatch, dtrain=0)
    running = runs(machine)
    running.results["runs"].clear()
    running._micro_batches.clear()
    running.run(in_turn(1)[:1])
    assert [sizes for _, sizes in machine.started] == [[8, 6, 4, 3, 2, 1], [1]]
    assert error_lines(running.records)[0].startswith("dtrain, 1.2B: does not fit: ")


def test_a_case_that_fails_is_not_repeated_and_costs_no_other(
    monkeypatch: pytest.MonkeyPatch, runs: Callable[..., InterleavedRuns]
) -> None:
    machine = Machine(monkeypatch)
    machine.errors["dtrain"] = "was ended by SIGSEGV: no output"
    running = runs(machine)
    running.run(in_turn())
    assert [name for name, _ in machine.started] == ["dtrain", "plain", "plain"]
    assert error_lines(running.records) == ["dtrain, 1.2B: was ended by SIGSEGV: no output"]


def test_runs_for_which_no_time_is_left_are_named(
    monkeypatch: pytest.MonkeyPatch, runs: Callable[..., InterleavedRuns]
) -> None:
    machine = Machine(monkeypatch)
    running = runs(machine, seconds=45.0)
    short = CaseRun(replace(PEER, name="short"), "1.2B", 0, 5.0)
    running.run([*in_turn(2), *in_turn(1, model="3B"), short])
    # after the first run of a case its own time is known, which is less than the estimate of 30 s
    assert [name for name, _ in machine.started] == ["dtrain", "plain", "dtrain", "plain", "short"]
    assert running.results["left_out"] == {
        "dtrain, 3B": "needs about 30 s, and 5 s were left",
        "plain, 3B": "needs about 30 s, and 5 s were left",
    }


def test_a_part_that_was_killed_goes_on(monkeypatch: pytest.MonkeyPatch, runs: Callable[..., InterleavedRuns]) -> None:
    machine = Machine(monkeypatch)
    runs(machine).run(in_turn()[:2])
    machine.started.clear()
    running = runs(machine)
    running.run(in_turn())
    assert machine.started == [("dtrain", [4]), ("plain", [4])]
    assert [found.number for found in running.records] == [0, 0, 1, 1]


def test_a_library_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, runs: Callable[..., InterleavedRuns]
) -> None:
    monkeypatch.setattr("dtrain.tools.bench.peers.find_spec", lambda name: None)
    machine = Machine(monkeypatch)
    running = runs(machine)
    running.run([CaseRun(BenchmarkCase("DeepSpeed", "deepspeed_2", 1, "bf16"), "1.2B"), *in_turn(1)])
    assert [name for name, _ in machine.started] == ["dtrain", "plain"]
    assert running.results["left_out"] == {"DeepSpeed, 1.2B": "package deepspeed is not installed"}


def test_speed_ups_pair_runs_by_their_number_and_count_tokens() -> None:
    own = [record("dtrain", "1.2B", number, 4, [ms]) for number, ms in ((0, 100.0), (1, 110.0), (2, 90.0))]
    other = [record("peer", "1.2B", number, 2, [ms]) for number, ms in ((1, 99.0), (0, 75.0))]
    # twice the sequences in a step
    assert speed_ups(own, other) == pytest.approx([1.5, 1.8])
    assert speed_ups(own, []) == []


@pytest.mark.parametrize(("gib", "expected"), [(80, 3), (40, 1), (141, 6), (20, 1)])
def test_the_largest_micro_batch_that_fits_by_one_sequence(gib: int, expected: int) -> None:
    assert largest_fitting((8, 6, 4, 3, 2, 1), 22 * GIB, 15 * GIB, gib * GIB) == expected


def test_without_known_memory_the_first_micro_batch_is_taken() -> None:
    assert largest_fitting((8, 1), 0, 0, 0) == 8
