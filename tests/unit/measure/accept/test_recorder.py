"""The tests of ``tests/gpu`` as a job runs them: a crash or a dead device costs one test."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.config.tool_schema import AcceptConfig
from dtrain.measure.accept import run as accept_run
from dtrain.measure.accept.job import DONE, FAILED, PartJob
from dtrain.measure.accept.lines import read_lines
from dtrain.measure.accept.table import Plan

TESTS = """
import os, pytest
def test_passes(): pass
def test_fails(): assert 1 == 2, "one"
@pytest.mark.skip(reason="older than Ampere")
def test_skipped(): pass
def test_crashes(): os.abort()
def test_dies(dead): pass
def test_after(): pass
"""
DEAD = """
import pytest
from dtrain.measure.accept import recorder
@pytest.fixture
def dead():
    recorder._context_error = lambda: "CUDA error: an illegal memory access"
    raise RuntimeError("illegal address")
"""
FILES = {"conftest.py": DEAD, "test_engine.py": TESTS, "test_bad.py": "import nothing_here"}


@pytest.mark.processes
@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [0, 2])
def test_a_crash_costs_one_test(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = tmp_path / "tests/gpu", tmp_path / "out"
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setenv("PYTEST_ADDOPTS", "")
    options = "-p no:cacheprovider -q --tb=short --continue-on-collection-errors -p dtrain.measure.accept.recorder"
    options += f" -n {workers} --max-worker-restart 60" if workers else " -p no:xdist"
    command = f"DTRAIN_RECORDS={{out}} pytest {options} {folder}"
    job = PartJob("tests", "tests", command, 120.0, ".jsonl", "-", starts=9)
    monkeypatch.setattr(accept_run, "make_plan", lambda *_, **__: Plan([], 0.0, [job]))
    (ended,) = accept_run.accept(AcceptConfig(device="cpu"), "dtrain accept", out, 0.0).ended
    assert ended.status in (DONE, FAILED)
    lines = read_lines(ended, out)
    assert lines.conclusions == ["3 failed, 1 not ended, 2 passed, 1 skipped"]
    name = "tests/gpu/test_engine.py::test_"
    found = dict(line.split(": ", 1) for line in lines.failures)
    assert found[f"{name}fails"].startswith("AssertionError: one")
    assert found[f"{name}crashes"] == "its process ended in it"
    assert "does not answer after it: CUDA error: an illegal memory access" in found[f"{name}dies"]
    assert "No module named 'nothing_here'" in found["tests/gpu/test_bad.py"]
    text = "\n".join(lines.section)
    assert "- 1 test: Skipped: older than Ampere" in text
    assert "assert 1 == 2" in text
