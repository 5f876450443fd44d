"""Parts and a machine for tests of the command itself: no torch, and each part does what its file says."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.tools.accept import run as accept_run
from dtrain.tools.accept.part import Part

MACHINE = """
def run(request):
    return {
        "host": {"cpu": "fake"}, "host_summary": "a fake host", "device": "cpu", "name": "cpu", "memory_gib": 1.0,
        "small": True, "peak_tflops": {}, "packages": {},
    }
"""
SECTION = """
def section(results):
    return [f"section of {sorted(results)}"]
"""
GOOD = """
import pathlib
def run(request):
    runs = pathlib.Path(request.directory, "runs")
    runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
    return {"seconds": request.seconds, "conclusions": ["fast"], "left_out": {"a peer": "not installed"}}
"""
BROKEN = """
from dtrain.tools.accept.part import save_partial
def run(request):
    save_partial(request, {"first": 1.0})
    raise ValueError("no such\\nkernel")
"""
SLOW = """
import pathlib, subprocess, time
from dtrain.tools.accept.part import load_partial, save_partial
def run(request):
    if load_partial(request):
        return {"again": True}
    child = subprocess.Popen(["sleep", "60"])
    pathlib.Path(request.directory, "child").write_text(str(child.pid))
    save_partial(request, {"first": 1.0})
    time.sleep(60)
"""


def make_parts(folder: Path, monkeypatch: pytest.MonkeyPatch, **sources: str) -> list[Part]:
    """Returns the parts a, b, ... of these sources by name, and makes their modules and the machine importable."""
    folder.mkdir(exist_ok=True)
    (folder / "fake_machine.py").write_text(MACHINE, encoding="utf-8")
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source + SECTION, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(accept_run, "_MACHINE", "fake_machine")
    return [Part(key, f"Part {name}", 5.0, name) for key, name in zip("abcdefg", sources, strict=False)]
