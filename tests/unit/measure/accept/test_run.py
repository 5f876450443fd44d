"""The command with processes: jobs that exit, hang, crash or raise, its time limit, a kill, and starting again."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtrain.config.tool_schema import AcceptConfig
from dtrain.errors import ConfigError
from dtrain.measure.accept import run as accept_run
from dtrain.measure.accept.job import CUT, DONE, FAILED, LATE, Ended, PartJob
from dtrain.measure.accept.page import Acceptance
from dtrain.measure.accept.plan import Plan
from dtrain.measure.accept.run import accept
from tests.helpers.launch import ROOT, is_gone

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_ranks")]

# jobs that do what their source says, without torch
GOOD = """
import time
IMPORTED = time.time()
def run(request):
    times = {"imported": IMPORTED, "began": time.time()}
    yield {"seconds": request.seconds, "left_out": {"a peer": "not installed"}, **times}
def conclusions(results):
    return [f"fast within {results['seconds']:.0f} s"]
def section(results):
    return ["section of good"]
"""
_BEGIN = """
import ctypes, os, pathlib, subprocess, time
def run(request):
    yield {"first": 1.0}
"""
EXCEPTION = _BEGIN + "    raise ValueError('no such\\nkernel')\n"
EXIT = _BEGIN + "    os._exit(7)\n"
FAULT = _BEGIN + "    ctypes.string_at(0)\n"
HANG = """
import pathlib, subprocess, time
def run(request):
    child = subprocess.Popen(["sleep", "600"])
    pathlib.Path(request.directory, "child").write_text(str(child.pid))
    yield {"first": 1.0}
    time.sleep(600)
"""
MISSING = "import no_such_library\n"


def make_jobs(folder: Path, monkeypatch: pytest.MonkeyPatch, **sources: str) -> list[PartJob]:
    """Returns a job for each source by its name, of the part ``environment``; their modules become importable."""
    package = folder / "planted_jobs"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    for name, source in sources.items():
        (package / f"{name}.py").write_text(source, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return [PartJob(name, "environment", f"planted_jobs.{name}", 5.0, 60.0) for name in sources]


def plan_of(monkeypatch: pytest.MonkeyPatch, together: list[PartJob], alone: list[PartJob], seconds: float) -> None:
    """Makes ``accept`` run these jobs, for ``seconds`` side by side."""
    monkeypatch.setattr(accept_run, "make_plan", lambda *_, **__: Plan(together, seconds, alone))


COMMAND = """
import sys
from pathlib import Path
from dtrain.config.tool_schema import AcceptConfig
from dtrain.measure.accept import run
from dtrain.measure.accept.job import PartJob
from dtrain.measure.accept.plan import Plan
jobs = [PartJob(name, "environment", f"planted_jobs.{name}", 5.0, 600.0) for name in ("good", sys.argv[1])]
run.make_plan = lambda *_, **__: Plan([], 0.0, jobs)
run.accept(AcceptConfig(device="cpu", archive="a.tar.gz"), "dtrain accept", Path("out"), 0.0)
"""


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def run(folder: Path, age_s: float = 0.0, **options: Any) -> Acceptance:
    return accept(AcceptConfig(device="cpu", **options), "dtrain accept", folder, age_s)


def by_name(acceptance: Acceptance) -> dict[str, Ended]:
    return {found.name: found for found in acceptance.ended}


@pytest.mark.parametrize("side_by_side", [True, False])
def test_a_failure_of_one_job_costs_no_other(side_by_side: bool, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    sources = {"exit": EXIT, "hang": HANG, "fault": FAULT, "raises": EXCEPTION, "missing": MISSING, "good": GOOD}
    made = make_jobs(tmp_path, monkeypatch, **sources)
    jobs = [replace(job, limit_s=1.5) if job.name == "hang" else job for job in made]
    plan_of(monkeypatch, jobs if side_by_side else [], [] if side_by_side else jobs, 300.0)
    archive = tmp_path / "a.tar.gz"
    with caplog.at_level(logging.INFO):
        acceptance = run(tmp_path / "out", archive=str(archive))
    found = by_name(acceptance)
    statuses = {"exit": FAILED, "hang": LATE, "fault": FAILED, "raises": FAILED, "missing": FAILED, "good": DONE}
    assert {name: ended.status for name, ended in found.items()} == statuses
    assert found["exit"].error.startswith("ended with exit code 7")
    assert found["fault"].error.startswith("was ended by SIGSEGV")
    assert found["raises"].error == "ended with exit code 1: ValueError: no such kernel"
    assert "this is its limit" in found["hang"].error
    assert "No module named 'no_such_library'" in found["missing"].error
    for name in ("exit", "hang", "fault", "raises"):
        assert found[name].results["first"] == 1.0, "partial results stay"
    assert any("ValueError: no such" in line for line in found["raises"].tail)
    assert len(acceptance.failures) == 5
    wait_for(lambda: is_gone(int((tmp_path / "out/scratch/child").read_text())))
    assert "  fast within 5 s" in caplog.messages
    assert any("FAILED fault failed: was ended by SIGSEGV" in line for line in caplog.messages)
    page = (tmp_path / "out/accept.md").read_text()
    assert "**1 of 6 jobs done; 5 things did not work:**" in page
    assert "section of good" in page
    assert "- environment: a peer: not installed" in page
    with tarfile.open(archive) as tar:
        inside = set(tar.getnames())
    assert {f"out/jobs/{name}.json" for name in sources} | {"out/accept.md", "out/accept.json"} <= inside
    assert not [name for name in inside if "caches" in name or name.endswith(".tmp")]


def test_a_killed_command_leaves_in_its_archive_what_was_found_and_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    make_jobs(tmp_path, monkeypatch, good=GOOD, hang=HANG, quick=GOOD)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}

    def start(second: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", COMMAND, second], cwd=tmp_path, env=environment)

    def archived() -> list[tuple[str, str, Any]]:
        if not (tmp_path / "a.tar.gz").exists():
            return []
        with tarfile.open(tmp_path / "a.tar.gz") as tar:
            file = tar.extractfile("out/accept.json")
            assert file is not None
            ended = json.load(file)["ended"]
        return [(job["name"], job["status"], job["results"].get("first")) for job in ended]

    command = start("hang")
    wait_for(lambda: len(archived()) == 2)
    command.send_signal(signal.SIGKILL)
    command.wait()
    wait_for(lambda: is_gone(int((tmp_path / "out/scratch/child").read_text())))  # what the job had started ends too
    assert archived() == [("good", DONE, None), ("hang", "under way", 1.0)]
    first = (tmp_path / "out/jobs/good.json").read_text()
    assert start("quick").wait() == 0
    assert archived() == [("good", DONE, None), ("quick", DONE, None)]
    assert (tmp_path / "out/jobs/good.json").read_text() == first


@pytest.mark.parametrize("side_by_side", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_nothing_outlives_the_limit_and_a_cut_fails_none(side_by_side: bool, tmp_path: Path, monkeypatch: Any) -> None:
    hang, good = make_jobs(tmp_path, monkeypatch, hang=HANG, good=GOOD)
    hang = replace(hang, again=lambda job, ended: replace(job, name="again"))
    plan_of(monkeypatch, [hang] if side_by_side else [], [good] if side_by_side else [hang, good], 1000.0)
    monkeypatch.setattr(accept_run, "LIMITS_S", {"all": 109.0})
    begin = time.monotonic()
    acceptance = run(tmp_path / "out", age_s=100.0)  # imports took long
    assert time.monotonic() - begin < 9.0
    (ended,) = acceptance.ended
    assert (ended.status, ended.results) == (CUT, {"first": 1.0})
    assert "no time was left" in ended.error
    assert acceptance.failures == []
    assert acceptance.not_run == {"good": "no time left"}
    wait_for(lambda: is_gone(int((tmp_path / "out/scratch/child").read_text())))


@pytest.mark.parametrize("side_by_side", [True, False])
def test_what_a_failed_job_has_left_is_done_by_another(side_by_side: bool, tmp_path: Path, monkeypatch: Any) -> None:
    first, smaller, last = make_jobs(tmp_path, monkeypatch, first=FAULT, smaller=GOOD, last=GOOD)
    seen: list[Ended] = []

    def again(job: PartJob, ended: Ended) -> PartJob:
        seen.append(ended)
        return replace(smaller, name="first")

    jobs = [replace(first, again=again), last]
    plan_of(monkeypatch, jobs if side_by_side else [], [] if side_by_side else jobs, 300.0)
    acceptance = run(tmp_path / "out")
    assert [ended.status for ended in seen] == [FAILED]
    assert {name: ended.status for name, ended in by_name(acceptance).items()} == {"first": DONE, "last": DONE}


def test_a_case_that_failed_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, other = make_jobs(tmp_path, monkeypatch, first=EXCEPTION, second=GOOD, other=GOOD)
    names = ("3B, dtrain, run 1", "3B, dtrain, run 2", "3B, dtrain, eager, run 1")
    jobs = [replace(job, name=name) for job, name in zip((first, second, other), names, strict=True)]
    plan_of(monkeypatch, [], jobs, 0.0)
    acceptance = run(tmp_path / "out")
    assert {name: ended.status for name, ended in by_name(acceptance).items()} == {names[0]: FAILED, names[2]: DONE}
    assert acceptance.not_run == {names[1]: "3B, dtrain, run 1 failed"}


def test_results_of_another_version_are_not_reused(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    plan_of(monkeypatch, [], make_jobs(tmp_path, monkeypatch, good=GOOD), 0.0)
    began = [by_name(run(tmp_path / "out"))["good"].results["began"] for _ in range(2)]
    assert began[0] == began[1]
    monkeypatch.setattr(accept_run, "version", lambda: "9.9")
    assert by_name(run(tmp_path / "out"))["good"].results["began"] > began[1]
    assert "good: measured on another machine or with other versions" in caplog.messages


def test_what_cannot_be_honored_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_of(monkeypatch, [], [], 0.0)
    (tmp_path / "file").write_text("no archive")
    with pytest.raises(ConfigError, match=r"out=.*file/out cannot be created: Not a directory"):
        run(tmp_path / "file/out")
    with pytest.raises(ConfigError, match=r"caches=.*file is not an archive of caches"):
        run(tmp_path / "out", caches=str(tmp_path / "file"))
    monkeypatch.setattr(accept_run, "driver_facts", dict)
    with pytest.raises(ConfigError, match="nvidia-smi shows no GPU"):
        accept(AcceptConfig(device="cuda"), "dtrain accept", tmp_path / "out", 0.0)
