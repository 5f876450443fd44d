"""Jobs that do what their source says, without torch, for tests of the command's own processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.tools.accept import run as accept_run
from dtrain.tools.accept.job import PartJob
from dtrain.tools.accept.plan import Plan

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
