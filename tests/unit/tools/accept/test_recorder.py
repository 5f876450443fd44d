"""The tests of tests/gpu as a job runs them: records at once, a crash or a dead device costs one test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dtrain.tools.accept.job import Request
from dtrain.tools.accept.parts import gpu_tests
from dtrain.tools.accept.parts.gpu_tests import conclusions, counts, read_records, section

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
from dtrain.tools.accept import recorder
@pytest.fixture
def dead():
    recorder._context_error = lambda: "CUDA error: an illegal memory access"
    raise RuntimeError("illegal address")
"""


def run(root: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch, workers: int) -> list[dict[str, Any]]:
    folder = root / "tests/gpu"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    if not workers:
        monkeypatch.setattr(gpu_tests, "find_spec", lambda name: None if name == "xdist" else object())
    monkeypatch.setattr(gpu_tests, "_SAVE_S", 0.0)
    monkeypatch.setenv("PYTEST_ADDOPTS", "")
    names = [f"tests/gpu/{name}" for name in files if name.startswith("test_")]
    options = {"files": names, "workers": workers, "root": str(root)}
    request = Request("cpu", True, str(root / "tests.partial.json"), str(root), 60.0, options)
    return list(gpu_tests.run(request))


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_crash_costs_one_test(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"conftest.py": DEAD, "test_engine.py": TESTS, "test_bad.py": "import nothing_here"}
    partial, results = run(tmp_path, files, monkeypatch, workers)[-2:]
    assert partial["tests"] is not results["tests"], "results so far were yielded"
    assert counts(results["tests"]) == {"passed": 2, "failed": 3, "skipped": 1, "not ended": 1}
    name = "tests/gpu/test_engine.py::test_"
    found = dict(line.split(": ", 1) for line in results["failures"])
    assert found[f"{name}fails"].startswith("AssertionError: one")
    assert found[f"{name}crashes"] == "its process ended in it"
    assert "does not answer after it: CUDA error: an illegal memory access" in found[f"{name}dies"]
    assert "No module named 'nothing_here'" in found["tests/gpu/test_bad.py"]
    text = "\n".join(section(results))
    assert "- 1 test: Skipped: older than Ampere" in text
    assert "assert 1 == 2" in text
    assert conclusions(results)[0].startswith("tests: 3 failed, 1 not ended, 2 passed, 1 skipped")


def test_half_a_record_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    lines = ['{"begin": "a"}', '{"test": "a", "outcome": "failed", "when": "call"}']
    lines += ['{"test": "a", "outcome": "skipped", "when": "teardown"}', '{"begin": "b"}', '{"test": "b", "outc']
    path.write_text("\n".join(lines))
    found = read_records(path)
    assert found["b"] is None
    assert (found["a"] or {})["outcome"] == "failed", "the worse phase of a test"
