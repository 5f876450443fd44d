"""The command line of ``dtrain accept``, and dry runs: a CPU in place of the GPU, tiny shapes."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from dtrain.__main__ import main
from dtrain.config.tool_schema import AcceptConfig
from dtrain.measure.accept import cli
from dtrain.measure.accept.job import FAILED, Ended
from dtrain.measure.accept.page import Acceptance
from dtrain.measure.accept.table import LIMITS_S, PARTS, Machine, make_plan


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[AcceptConfig, Path]]:
    """The runs that the command requests; one job fails if the folder is named ``wrong``."""
    seen: list[tuple[AcceptConfig, Path]] = []

    def accept(config: AcceptConfig, command: str, folder: Path, age_s: float) -> Acceptance:
        assert 0 <= age_s < 3600
        seen.append((config, folder))
        ended = [Ended("rates", "rates", "", FAILED, 1.0, "none")] if folder.name == "wrong" else []
        return Acceptance(command, "now", config.goal, 1.0, {"device": "cpu", "packages": {}}, ended)

    monkeypatch.setattr(cli, "accept", accept)
    return seen


def test_keys_defaults_and_exit_codes(accepted: list[Any], tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """The process of the test, which may be older than the limit, is not ended."""
    monkeypatch.chdir(tmp_path)
    for name in ("process_age_s", "_ended_after"):
        monkeypatch.setattr(cli, name, lambda *_: pytest.fail("this process is not the command"))
    words = ["goal=facts", "limit_s=90", "parts=rates,steps", "out=o", "archive=a.tar.gz", "caches=c.tar.gz"]
    assert main(["accept", *words, "device=cpu"]) == 0
    given = AcceptConfig("facts", 90.0, "a.tar.gz", "c.tar.gz", "o", ["rates", "steps"], "cpu")
    assert accepted.pop() == (given, Path("o"))
    shown = capsys.readouterr().out
    assert ("| G7 | " in shown, "### Jobs" in shown) == (True, False)  # the page has the rest
    assert main(["accept", "parts=null"]) == 0
    config, folder = accepted.pop()
    assert config == AcceptConfig()
    assert config.goal == "all"
    assert str(folder).startswith("runs/accept-2")
    assert main(["accept", "out=wrong"]) == 1


@pytest.mark.processes
def test_the_limit_holds_if_the_command_itself_hangs(tmp_path: Path) -> None:
    """Imports before the command count too."""
    code = (
        "import time; time.sleep(1.5)\n"
        "from dtrain.measure.accept import cli\n"
        "assert cli.process_age_s() > 1.4\n"
        "cli.LIMITS_S['all'] = cli.process_age_s() + 1.0\n"
        "cli.accept = lambda *_: time.sleep(600)\n"
        "from dtrain.__main__ import main\n"
        "main()\n"
    )
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code, "accept", "out=x"], cwd=tmp_path, timeout=120, check=False)
    assert done.returncode == 124
    assert time.monotonic() - begin < 60


FILES = ["device=cpu", "out=out", "archive=all.tar.gz", "caches=caches.tar.gz"]


def check_results(folder: Path, shown: str, goal: str, parts: list[str] | None, ended: set[str]) -> None:
    """Checks the files of a dry run. The jobs ``ended`` end on any machine; a busy one may not come to others."""
    content = json.loads((folder / "out/accept.json").read_text())
    statuses = {found["name"]: found["status"] for found in content["ended"]}
    planned = make_plan(goal, Machine("cpu"), LIMITS_S[goal], parts=parts).jobs
    assert set(statuses) | set(content["not_run"]) == {job.name for job in planned}
    assert set(statuses.values()) <= {"done", "cut short"}
    assert {name for name, status in statuses.items() if status == "done"} >= ended
    with tarfile.open(folder / "all.tar.gz") as tar:
        inside = set(tar.getnames())
    assert {"out/accept.json", "out/accept.md"} <= inside
    assert len(statuses) == len([name for name in inside if name.startswith("out/jobs/") and name.endswith(".json")])
    page = (folder / "out/accept.md").read_text()
    assert all(f"| G{number} |" in page and f"| G{number} |" in shown for number in range(1, 8))
    assert all(f"\n## {PARTS[found['part']]}\n" in page for found in content["ended"])
    assert all(f"\n### {found['name']}\n\n`{found['command']}`\n" in page for found in content["ended"])
    assert sorted(path.name for path in folder.iterdir()) == ["all.tar.gz", "caches.tar.gz", "out"]


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.usefixtures("warm_ranks")
def test_a_dry_run_of_two_parts(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # so that what the command sets is undone
        monkeypatch.delenv(name)
    assert main(["accept", "goal=figures", "parts=rates,memory", *FILES]) == 0
    shown = capsys.readouterr().out
    check_results(tmp_path, shown, "figures", ["rates", "memory"], {"products", "loss head", "states"})


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.parametrize(("goal", "ended"), [("facts", {"first uses"}), ("figures", {"optimizer"})])
def test_a_dry_run_as_a_user_types_it(goal: str, ended: set[str], tmp_path: Path) -> None:
    begin = time.monotonic()
    command = [sys.executable, "-m", "dtrain", "accept", f"goal={goal}", "limit_s=40", *FILES]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    seconds = time.monotonic() - begin
    assert done.returncode == 0, done.stdout + done.stderr
    assert seconds < 43, "the limit counts from the start of the process"
    check_results(tmp_path, done.stdout, goal, None, ended)
