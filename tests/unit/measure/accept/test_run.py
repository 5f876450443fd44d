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
from dtrain.measure.accept.job import CUT, DONE, FAILED, LATE, UNDER_WAY, Ended, PartJob
from dtrain.measure.accept.page import Acceptance
from dtrain.measure.accept.run import accept
from dtrain.measure.accept.table import Plan
from tests.helpers.launch import ROOT, is_gone

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_ranks")]

# modules that do what their source says, with results as of first uses, without torch
_BEGIN = """
import ctypes, json, os, pathlib, subprocess, sys, time
out = pathlib.Path(sys.argv[1].removeprefix("out="))
def write(*found):
    steps = [{"step": "fast", "s": 1.0, "found": text, "error": ""} for text in (*found, str(time.time()))]
    out.write_text(json.dumps({"host": {}, "steps": steps}))
"""
GOOD = _BEGIN + "write()\n"
EXCEPTION = _BEGIN + "write('first')\nraise ValueError('no such\\nkernel')\n"
EXIT = _BEGIN + "write('first')\nos._exit(7)\n"
FAULT = _BEGIN + "write('first')\nctypes.string_at(0)\n"
HANG = (
    _BEGIN
    + """
child = subprocess.Popen(["sleep", "600"])
(out.parents[1] / "child").write_text(str(child.pid))
write("first")
time.sleep(600)
"""
)
MISSING = "import no_such_library\n"
CRASHES_TWICE = (
    _BEGIN
    + """
if not out.exists() or "twice" not in out.read_text():
    write("twice" if out.exists() else "once")
    ctypes.string_at(0)
write("three")
"""
)


def make_jobs(folder: Path, monkeypatch: pytest.MonkeyPatch, **sources: str) -> list[PartJob]:
    """Returns a job for each source by its name, of the part ``environment``; their modules become importable."""
    package = folder / "planted_jobs"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    for name, source in sources.items():
        (package / f"{name}.py").write_text(source, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return [planted(name) for name in sources]


def planted(name: str, **changes: Any) -> PartJob:
    job = PartJob(name, "environment", f"planted_jobs.{name} out={{out}}", 60.0, imported="-")
    return replace(job, **changes)


def plan_of(monkeypatch: pytest.MonkeyPatch, together: list[PartJob], alone: list[PartJob], seconds: float) -> None:
    """Makes ``accept`` run these jobs, for ``seconds`` side by side."""
    monkeypatch.setattr(accept_run, "make_plan", lambda *_, **__: Plan(together, seconds, alone))


COMMAND = """
import sys
from pathlib import Path
from dtrain.config.tool_schema import AcceptConfig
from dtrain.measure.accept import run
from dtrain.measure.accept.table import Plan
from tests.unit.measure.accept.test_run import planted
jobs = [planted(name, limit_s=600.0) for name in ("good", sys.argv[1])]
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


def found_in(folder: Path, name: str) -> list[Any]:
    """What the steps in the results of a job have found; the last is the time of its end."""
    return [step["found"] for step in json.loads((folder / "results" / f"{name}.json").read_text())["steps"]]


@pytest.mark.parametrize("side_by_side", [True, False])
def test_a_failure_of_one_job_costs_no_other(side_by_side: bool, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    sources = {"exit": EXIT, "hang": HANG, "fault": FAULT, "raises": EXCEPTION, "missing": MISSING, "good": GOOD}
    made = make_jobs(tmp_path, monkeypatch, **sources)
    jobs = [replace(job, limit_s=1.5) if job.name == "hang" else job for job in made]
    plan_of(monkeypatch, jobs if side_by_side else [], [] if side_by_side else jobs, 300.0)
    archive, out = tmp_path / "a.tar.gz", tmp_path / "out"
    with caplog.at_level(logging.INFO):
        acceptance = run(out, archive=str(archive))
    found = by_name(acceptance)
    statuses = {"exit": FAILED, "hang": LATE, "fault": FAILED, "raises": FAILED, "missing": FAILED, "good": DONE}
    assert {name: ended.status for name, ended in found.items()} == statuses
    assert found["exit"].error.startswith("ended with exit code 7")
    assert found["fault"].error.startswith("was ended by SIGSEGV")
    assert found["raises"].error == "ended with exit code 1: ValueError: no such kernel"
    assert "this is its limit" in found["hang"].error
    assert "No module named 'no_such_library'" in found["missing"].error
    for name in ("exit", "hang", "fault", "raises"):
        assert found_in(out, name)[0] == "first", "partial results stay"
    assert any("ValueError: no such" in line for line in found["raises"].tail)
    assert len(acceptance.failures(out)) == 5
    wait_for(lambda: is_gone(int((out / "child").read_text())))
    assert "  1 of 1 work: fast 1.0 s" in caplog.messages
    assert any(line.startswith("fault: failed, ") and "was ended by SIGSEGV" in line for line in caplog.messages)
    page = (out / "accept.md").read_text()
    assert "**1 of 6 jobs done; 5 things did not work:**" in page
    assert "`python -m planted_jobs.good`" in page
    with tarfile.open(archive) as tar:
        inside = set(tar.getnames())
    assert {f"out/jobs/{name}.json" for name in sources} | {"out/accept.md", "out/accept.json"} <= inside
    assert not [name for name in inside if "caches" in name or name.endswith(".tmp")]


def test_a_killed_command_leaves_in_its_archive_what_was_found_and_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    make_jobs(tmp_path, monkeypatch, good=GOOD, hang=HANG, quick=GOOD)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}

    def start(second: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", COMMAND, second], cwd=tmp_path, env=environment)

    def archived() -> list[tuple[str, str, int]]:
        if not (tmp_path / "a.tar.gz").exists():
            return []
        with tarfile.open(tmp_path / "a.tar.gz") as tar:
            file = tar.extractfile("out/accept.json")
            assert file is not None
            ended = json.load(file)["ended"]
        return [(job["name"], job["status"], len(job["results"]["steps"])) for job in ended]

    command = start("hang")
    wait_for(lambda: len(archived()) == 2)
    command.send_signal(signal.SIGKILL)
    command.wait()
    wait_for(lambda: is_gone(int((tmp_path / "out/child").read_text())))  # what the job had started ends too
    assert archived() == [("good", DONE, 1), ("hang", UNDER_WAY, 2)]
    first = (tmp_path / "out/jobs/good.json").read_text()
    assert start("quick").wait() == 0
    assert archived() == [("good", DONE, 1), ("quick", DONE, 1)]
    assert (tmp_path / "out/jobs/good.json").read_text() == first


@pytest.mark.parametrize("side_by_side", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_nothing_outlives_the_limit_and_a_cut_fails_none(side_by_side: bool, tmp_path: Path, monkeypatch: Any) -> None:
    hang, good = make_jobs(tmp_path, monkeypatch, hang=HANG, good=GOOD)
    hang = replace(hang, starts=9)
    plan_of(monkeypatch, [hang] if side_by_side else [], [good] if side_by_side else [hang, good], 1000.0)
    monkeypatch.setattr(accept_run, "LIMITS_S", {"all": 109.0})
    begin, out = time.monotonic(), tmp_path / "out"
    acceptance = run(out, age_s=100.0)  # imports took long
    assert time.monotonic() - begin < 9.0
    (ended,) = acceptance.ended
    assert ended.status == CUT
    assert found_in(out, "hang")[0] == "first"
    assert "no time was left" in ended.error
    assert acceptance.failures(out) == []
    assert acceptance.not_run == {"good": "no time left"}
    wait_for(lambda: is_gone(int((out / "child").read_text())))


@pytest.mark.parametrize("side_by_side", [True, False])
def test_what_a_crash_has_left_is_done_by_another_start(side_by_side: bool, tmp_path: Path, monkeypatch: Any) -> None:
    first, last = make_jobs(tmp_path, monkeypatch, first=CRASHES_TWICE, last=GOOD)
    for starts, status in ((3, DONE), (2, FAILED)):
        jobs, out = [replace(first, starts=starts), last], tmp_path / f"out{starts}"
        plan_of(monkeypatch, jobs if side_by_side else [], [] if side_by_side else jobs, 300.0)
        found = by_name(run(out))
        assert {name: ended.status for name, ended in found.items()} == {"first": status, "last": DONE}
        assert found_in(out, "first")[0] == ("three" if status == DONE else "twice")


@pytest.mark.parametrize(("status", "is_kept"), [(FAILED, True), (CUT, False), (LATE, False)])
def test_tests_that_were_killed_are_repeated(status: str, is_kept: bool, tmp_path: Path, monkeypatch: Any) -> None:
    (job,) = make_jobs(
        tmp_path, monkeypatch, good="import sys, pathlib\npathlib.Path(sys.argv[1]).open('a').write('x')"
    )
    job = replace(job, results=".jsonl", command="planted_jobs.good {out}")
    plan_of(monkeypatch, [], [job], 0.0)
    out = tmp_path / "out"
    run(out)
    path, records = out / "jobs/good.json", out / "results/good.jsonl"
    path.write_text(path.read_text().replace('"done"', f'"{status}"'))
    records.write_text('{"begin": "a test"}\n')
    run(out)
    assert (records.read_text() == '{"begin": "a test"}\nx') == is_kept


def test_results_of_another_version_are_not_reused(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    plan_of(monkeypatch, [], make_jobs(tmp_path, monkeypatch, good=GOOD), 0.0)
    out, times = tmp_path / "out", []
    for number in ("1.0", "1.0", "9.9"):
        monkeypatch.setattr(accept_run, "version", lambda number=number: number)
        run(out)
        times.append(found_in(out, "good")[-1])
    assert times[0] == times[1] < times[2]
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
