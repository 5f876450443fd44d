"""A dry run of both goals as a user types them: a CPU in place of the GPU, tiny shapes, the same files and page."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from dtrain.tools.accept.plan import LIMITS_S, PARTS, Machine, make_plan

pytestmark = pytest.mark.processes

LIMIT_S = 40.0
FINISHED = {"facts": {"environment"}, "figures": {"optimizer", "rates"}}
"""Jobs that end on any machine; a busy one has no time for the rest, which must then be named."""


@pytest.mark.parametrize("goal", FINISHED)
def test_a_dry_run(goal: str, tmp_path: Path) -> None:
    words = [
        f"goal={goal}",
        "device=cpu",
        f"limit_s={LIMIT_S:g}",
        "out=out",
        "archive=all.tar.gz",
        "caches=caches.tar.gz",
    ]
    begin = time.monotonic()
    command = [sys.executable, "-m", "dtrain", "accept", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    seconds = time.monotonic() - begin
    assert done.returncode == 0, done.stdout + done.stderr
    assert seconds < LIMIT_S + 3, "the limit counts from the start of the process"
    content = json.loads((tmp_path / "out/accept.json").read_text())
    statuses = {found["name"]: found["status"] for found in content["ended"]}
    planned = [job.name for job in make_plan(goal, Machine("cpu"), LIMITS_S[goal]).jobs]
    assert set(statuses) | set(content["not_run"]) == set(planned)
    assert set(statuses.values()) <= {"done", "cut short"}, done.stderr
    assert {name for name, status in statuses.items() if status == "done"} >= FINISHED[goal]
    with tarfile.open(tmp_path / "all.tar.gz") as tar:
        inside = set(tar.getnames())
    assert inside >= {"out/accept.json", "out/accept.md", *(_result(found) for found in content["ended"])}
    assert (tmp_path / "caches.tar.gz").exists()
    page = (tmp_path / "out/accept.md").read_text()
    for number in range(1, 8):
        assert f"| G{number} |" in page
        assert f"| G{number} |" in done.stdout
    for part in {found["part"] for found in content["ended"]}:
        assert f"\n## {PARTS[part]}\n" in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.tar.gz", "caches.tar.gz", "out"]


def _result(found: dict[str, Any]) -> str:
    name = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in found["name"])
    return f"out/jobs/{name}.json"
