"""The command line of ``dtrain accept``."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dtrain.__main__ import main
from dtrain.config.tool_schema import AcceptConfig
from dtrain.tools.accept import cli
from dtrain.tools.accept.cli import process_age_s
from dtrain.tools.accept.job import FAILED, Ended
from dtrain.tools.accept.page import Acceptance


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[AcceptConfig, Path]]:
    """The runs that the command requests; one job fails if the folder is named ``wrong``."""
    seen: list[tuple[AcceptConfig, Path]] = []

    def accept(config: AcceptConfig, command: str, folder: Path, age_s: float) -> Acceptance:
        assert 0 <= age_s < 3600
        seen.append((config, folder))
        ended = [Ended("rates", "rates", FAILED, 1.0, {}, "no kernel")] if folder.name == "wrong" else []
        return Acceptance(command, "now", config.goal, 1.0, {"device": "cpu", "packages": {}}, ended)

    monkeypatch.setattr(cli, "accept", accept)
    return seen


@pytest.mark.parametrize("given", ["rates,steps", "[rates,steps]"])
def test_keys(given: str, accepted: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = ["goal=facts", "limit_s=90", f"parts={given}", f"out={out}", "archive=a.tar.gz", "caches=c.tar.gz"]
    assert main(["accept", *words, "device=cpu"]) == 0
    assert accepted == [(AcceptConfig("facts", 90.0, "a.tar.gz", "c.tar.gz", str(out), ["rates", "steps"], "cpu"), out)]
    shown = capsys.readouterr().out
    assert shown.startswith("# Acceptance of a CPU\n\n`dtrain accept goal=facts limit_s=90 ")
    assert "| G7 | " in shown
    assert "### Jobs" not in shown  # the page has the rest


def test_defaults_and_the_exit_code_if_something_does_not_work(
    accepted: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["accept", "parts=null"]) == 0
    ((config, folder),) = accepted
    assert config == AcceptConfig()
    assert config.goal == "all"
    assert str(folder).startswith("runs/accept-2")
    assert main(["accept", "out=wrong"]) == 1


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("part=rates", "unknown key 'part'; did you mean 'parts'?"),
        ("minutes=25", "unknown key 'minutes'"),
        ("parts=rates,h", "parts: 'h' is none of environment, casts, "),
        ("parts=[]", "parts=[] names no part"),
        ("goal=fact", "goal=fact is not one of all, facts, figures"),
        ("limit_s=10", "limit_s=10.0 is too small; it must be above 30"),
        ("out=", "out is empty"),
        ("archive=", "archive is empty"),
        ("device=gpu", "device=gpu is not one of auto, cpu, cuda"),
    ],
)
def test_mistakes_are_named(
    argument: str, message: str, accepted: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["accept", argument]) == 2
    assert message in capsys.readouterr().err
    assert accepted == []


@pytest.mark.processes
def test_the_limit_holds_if_the_command_itself_hangs(tmp_path: Path) -> None:
    """Imports before the command count too."""
    code = (
        "import time; time.sleep(1.5)\n"
        "from dtrain.tools.accept import cli\n"
        "cli.LIMITS_S['all'] = cli.process_age_s() + 1.0\n"
        "cli.accept = lambda *_: time.sleep(600)\n"
        "from dtrain.__main__ import main\n"
        "main()\n"
    )
    begin = time.monotonic()
    command = [sys.executable, "-c", code, "accept", "out=x"]
    done = subprocess.run(command, cwd=tmp_path, timeout=120, capture_output=True)
    assert done.returncode == 124
    assert time.monotonic() - begin < 60
    code = "import time; time.sleep(1)\nfrom dtrain.tools.accept.cli import process_age_s\nprint(process_age_s())"
    age = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(age.stdout) >= 1.0
    assert process_age_s() > 0


def test_a_program_that_calls_the_command_is_not_ended(
    accepted: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process may be older than the limit."""
    for name in ("process_age_s", "_ended_after"):
        monkeypatch.setattr(cli, name, lambda *_: pytest.fail("this process is not the command"))
    assert main(["accept", "limit_s=31", f"out={tmp_path}/out"]) == 0
    assert len(accepted) == 1


def test_under_a_launcher_it_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["accept"]) == 2
    assert "start it once, without a launcher" in capsys.readouterr().err
