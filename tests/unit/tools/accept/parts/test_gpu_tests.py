"""The tests of tests/gpu, as part a runs and reads them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from dtrain.tools.accept.parts import gpu_tests
from dtrain.tools.accept.parts.gpu_tests import add_results, find_tests, run_gpu_tests

OUTPUT = """
collecting ... collected 6 items

tests/gpu/test_engine.py::test_one PASSED                                [ 16%]
tests/gpu/test_engine.py::test_two[Float8(recipe='rowwise', choice='all')] FAILED [ 33%]
tests/gpu/test_engine.py::test_three[bf16] SKIPPED (older than Ampere)   [ 50%]
tests/gpu/test_engine.py::test_four ERROR                                [ 66%]
"""
SUMMARY = """
SKIPPED [1] tests/gpu/test_engine.py:12: older than Ampere
FAILED tests/gpu/test_engine.py::test_two[Float8(recipe='rowwise', choice='all')] - AssertionError: 1 - 2
ERROR tests/gpu/test_engine.py::test_four - RuntimeError: no NCCL
"""


def empty() -> dict[str, Any]:
    return {"passed": 0, "failed": 0, "skipped": 0, "failures": {}, "skips": {}, "unfinished": {}}


def test_results_are_counted_and_failures_named() -> None:
    results = empty()
    add_results(results, OUTPUT + SUMMARY, ["test_engine.py"], "", "x.log")
    assert (results["passed"], results["failed"], results["skipped"]) == (1, 2, 1)
    assert results["failures"] == {
        "tests/gpu/test_engine.py::test_two[Float8(recipe='rowwise', choice='all')]": "AssertionError: 1 - 2",
        "tests/gpu/test_engine.py::test_four": "RuntimeError: no NCCL",
    }
    assert results["skips"] == {"older than Ampere": 1}
    assert results["unfinished"] == {}


def test_a_run_that_was_killed_has_its_results_so_far_and_what_did_not_run() -> None:
    results = empty()
    add_results(results, OUTPUT, ["test_engine.py"], "not finished after 9 s", "x.log")
    assert (results["passed"], results["failed"]) == (1, 2)
    assert results["failures"]["tests/gpu/test_engine.py::test_four"] == "see x.log"
    assert results["unfinished"] == {"test_engine.py": "not finished after 9 s; 2 of 6 tests did not run"}


def test_a_file_that_cannot_be_imported_is_a_failure() -> None:
    results = empty()
    text = "collected 0 items / 1 error\nERROR tests/gpu/test_engine.py - ImportError: no module named x\n"
    add_results(results, text, ["test_engine.py"], "", "x.log")
    assert results["failures"] == {"tests/gpu/test_engine.py": "ImportError: no module named x"}
    assert results["failed"] == 1


def test_this_checkout_has_tests() -> None:
    root, reason = find_tests()
    assert (root, reason) == (Path(__file__).parents[5], "")


def make_file(root: Path, name: str, text: str) -> None:
    folder = root / "tests/gpu"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


@pytest.mark.processes
def test_each_file_has_a_process_so_a_crash_costs_no_other(tmp_path: Path) -> None:
    make_file(tmp_path, "test_engine.py", "import os\ndef test_a(): pass\ndef test_b(): os.abort()\n")
    make_file(tmp_path, "test_formats.py", "def test_a(): assert 1 == 2\n")
    saved: list[dict[str, Any]] = []
    results = run_gpu_tests(tmp_path, "cuda", time.monotonic() + 60, tmp_path, saved.append)
    assert len(saved) == 2
    assert (results["passed"], results["failed"]) == (1, 1)
    assert list(results["failures"]) == ["tests/gpu/test_formats.py::test_a"]
    assert results["unfinished"] == {"test_engine.py": "pytest was ended by SIGABRT; 1 of 2 tests did not run"}


@pytest.mark.processes
def test_a_test_that_hangs_is_killed_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tests, "_LEAST_S", 1.0)
    make_file(tmp_path, "test_engine.py", "import time\ndef test_a(): time.sleep(60)\n")
    make_file(tmp_path, "test_formats.py", "def test_a(): pass\n")
    begin = time.monotonic()
    results = run_gpu_tests(tmp_path, "cuda", begin + 3, tmp_path, lambda _: None)
    assert time.monotonic() - begin < 20
    assert results["unfinished"]["test_engine.py"].startswith("not finished after 3 s; ")
    assert results["unfinished"]["test_formats.py"] == "no time left"
