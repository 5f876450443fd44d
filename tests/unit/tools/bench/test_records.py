"""The JSON of `dtrain bench`: what is written can be read, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.config.dump import from_plain
from dtrain.errors import BenchError
from dtrain.tools.bench.records import (
    BenchmarkCase,
    CaseResult,
    FailedCase,
    Footprint,
    TimedSteps,
    TrainingResults,
    read_results,
    write_results,
)
from dtrain.tools.bench.report.document import describe
from tests.unit.tools.bench.made import result, results_of

numbers = st.floats(min_value=0.001, max_value=1e6)
timed_steps = st.builds(TimedSteps, st.lists(numbers), st.lists(st.none() | numbers), numbers, st.lists(numbers))


@settings(max_examples=50)
@given(st.lists(timed_steps, min_size=1, max_size=3), st.none() | st.integers(0, 2), st.none() | st.integers(0, 2**40))
def test_results_survive_json(drawn: list[TimedSteps], stage: int | None, device: int | None) -> None:
    footprint = Footprint(7, {"master": 1}, None if stage is None else {"master": 2}, 3, device, "cpu")
    item = CaseResult(BenchmarkCase("a", "native", 2, "bf16", stage), 0.5, drawn[0], drawn, footprint)
    results = replace(results_of([item]), failures=[FailedCase(item.case, "late")])
    values = json.loads(json.dumps(results, default=lambda record: record.__dict__))
    assert from_plain(TrainingResults, values) == results


def test_results_without_optional_keys_are_read(tmp_path: Path) -> None:
    write_results(tmp_path / "r.json", results_of([result("plain", 1, [[1.0]], engine="plain")]))
    old = json.loads((tmp_path / "r.json").read_text())
    del old["failures"], old["host"]["peers"]
    for timed in (old["cases"][0]["warmup"], *old["cases"][0]["rounds"]):
        del timed["cpu_ms"], timed["parts_ms"]
    for key in ("loss_scale", "times_vote", "samples", "baseline"):
        del old["cases"][0]["case"][key]
    (tmp_path / "r.json").write_text(json.dumps(old))
    assert "| not measured " in describe(read_results(tmp_path / "r.json")).markdown()


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_results(path, results_of([result("plain", 1, [[1.0]], [float("nan")], "plain")]))
    read = read_results(path)
    assert isinstance(read, TrainingResults)
    assert read.cases[0].rounds[0].losses == [None]
    good = json.loads(path.read_text())
    for damage in ({**good, "extra": 1}, {key: value for key, value in good.items() if key != "host"}, [], 3):
        path.write_text(json.dumps(damage))
        with pytest.raises(BenchError, match=r"r\.json is no results file"):
            read_results(path)
    with pytest.raises(BenchError, match=r"absent\.json is no results file"):
        read_results(tmp_path / "absent.json")
