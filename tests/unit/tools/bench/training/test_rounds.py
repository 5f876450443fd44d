"""The order of measurement: round by round; if a case fails, the others continue. No process is started."""

from __future__ import annotations

import pytest

from dtrain.cli.resolve import read_suite
from dtrain.config.commands import BENCH_ENGINE
from dtrain.config.tool_schema import EngineSuiteConfig
from dtrain.errors import BenchError
from dtrain.telemetry import host
from dtrain.tools.bench.records import BenchmarkCase, FailedCase, Footprint, TimedSteps
from dtrain.tools.bench.training import rounds
from tests.unit.tools.bench.made import SHORT, TINY

CALLS: list[str] = []


class FakeProcesses:
    """Takes steps without processes; the case named ``start`` fails at its start, ``steps`` in its first round."""

    def __init__(self, case: BenchmarkCase, config: object) -> None:
        self.case = case

    def __enter__(self) -> FakeProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        CALLS.append(f"{self.case.name} exit")

    def start(self) -> float:
        if self.case.name == "start":
            raise BenchError("start: rank 0 failed: no such engine")
        return 1.5

    def take_steps(self, count: int) -> TimedSteps:
        CALLS.append(f"{self.case.name} {count}")
        if self.case.name == "steps" and count == 2:
            raise BenchError("steps: rank 0 ended with exit code -9: no output")
        return TimedSteps([1.0] * count, [2.0] * count, 0.5)

    def footprint(self) -> Footprint:
        return Footprint(1, {}, None, 1, None, "cpu")

    def request_end(self) -> None:
        CALLS.append(f"{self.case.name} request_end")

    def end(self) -> None:
        CALLS.append(f"{self.case.name} end")


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> EngineSuiteConfig:
    monkeypatch.setattr(rounds, "CaseProcesses", FakeProcesses)
    monkeypatch.setattr(rounds, "memory_left", lambda: 1.0)
    CALLS.clear()
    found = read_suite([*TINY, *SHORT], BENCH_ENGINE)
    assert found is not None
    return found


def cases(*names: str) -> list[BenchmarkCase]:
    return [BenchmarkCase(name, "plain", 1, "bf16") for name in names]


def test_cases_alternate_in_every_round_and_end_together(config: EngineSuiteConfig) -> None:
    results, failures = rounds.run_rounds(cases("a", "b"), config)
    warmup, both = ["a 1", "b 1"], ["a 2", "b 2"]
    assert [*warmup, *both, *both, "a request_end", "b request_end", "b exit", "a exit"] == CALLS
    assert failures == []
    assert [(result.case.name, len(result.warmup.step_ms), len(result.rounds)) for result in results] == [
        *(("a", 1, 2), ("b", 1, 2))
    ]


def test_a_case_that_fails_is_ended_and_the_others_continue(config: EngineSuiteConfig) -> None:
    given = cases("start", "steps", "plain")
    results, failures = rounds.run_rounds(given, config)
    assert [(result.case.name, len(result.rounds)) for result in results] == [("plain", 2)]
    assert failures == [
        FailedCase(given[0], "start: rank 0 failed: no such engine"),
        FailedCase(given[1], "steps: rank 0 ended with exit code -9: no output"),
    ]
    assert CALLS.index("start end") < CALLS.index("steps 1")
    assert CALLS.index("steps end") < CALLS.index("plain 2")


def test_a_case_that_leaves_too_little_memory_fails(monkeypatch: pytest.MonkeyPatch, config: EngineSuiteConfig) -> None:
    monkeypatch.setattr(rounds, "memory_left", lambda: 0.04)
    with pytest.raises(BenchError, match="no case ran; plain: only 4% of the memory is left"):
        rounds.run_rounds(cases("plain"), config)
    assert 0.0 < host.memory_left() <= 1.0
