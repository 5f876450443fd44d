"""The command line of ``dtrain accept``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dtrain.__main__ import main
from dtrain.config.tool_schema import AcceptConfig
from dtrain.tools.accept import cli
from dtrain.tools.accept.records import Acceptance, PartRecord


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[AcceptConfig, Path]]:
    """The runs that the command requests; each finds one thing wrong if its page is in a folder named ``wrong``."""
    seen: list[tuple[AcceptConfig, Path]] = []

    def accept(config: AcceptConfig, command: str, folder: Path, parts: Any) -> Acceptance:
        seen.append((config, folder))
        folder.mkdir()
        (folder / "accept.md").write_text(f"# Title\n\n`{command}`\n\n## Result\n\nAll.\n\n## a. Rest\n")
        wrong = ["a matmul"] if folder.name == "wrong" else []
        record = PartRecord("a", "Rest", "done", 1.0, 1.0, "now", {}, {"failures": wrong})
        return Acceptance(command, "now", config.minutes, {}, [record], {})

    monkeypatch.setattr(cli, "accept", accept)
    return seen


@pytest.mark.parametrize("given", ["a,c", "[a,c]"])
def test_keys(given: str, accepted: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["accept", "minutes=3", f"parts={given}", f"out={out}", "device=cpu"]) == 0
    assert accepted == [(AcceptConfig(3.0, ["a", "c"], str(out), "cpu"), out)]
    shown = capsys.readouterr().out
    assert shown.startswith("# Title\n\n`dtrain accept minutes=3 ")
    assert "All." in shown
    assert "Rest" not in shown  # the page has the rest


def test_defaults_and_the_exit_code_if_something_does_not_work(
    accepted: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["accept", "parts=null"]) == 0
    ((config, folder),) = accepted
    assert config == AcceptConfig()
    assert str(folder).startswith("runs/accept-2")
    assert main(["accept", "out=wrong"]) == 1


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("part=a", "unknown key 'part'; did you mean 'parts'?"),
        ("parts=a,h", "parts=[a,h]: 'h' is no part; the parts are a (Training"),
        ("parts=[]", "parts=[]: names no part"),
        ("minutes=0", "minutes=0.0 is too small; it must be above 0"),
        ("out=", "out is empty"),
        ("device=gpu", "device=gpu is not one of auto, cpu, cuda"),
    ],
)
def test_mistakes_are_named(
    argument: str, message: str, accepted: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["accept", argument]) == 2
    assert message in capsys.readouterr().err
    assert accepted == []


def test_under_a_launcher_it_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["accept"]) == 2
    assert "start it once, without a launcher" in capsys.readouterr().err
