"""Mistakes on the command lines of the tools take one line, before any work; and each tool shows its help.

``python -m tests.unit.tools.test_mistakes`` writes ``mistakes.txt`` again; a new one is a line ``$ dtrain ...`` there.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from dtrain.__main__ import main
from dtrain.tools.data.cli import COMMANDS
from tests.unit.cli.regenerate_golden import message

GOLDEN = Path(__file__).parent / "mistakes.txt"
STORED = dict(re.findall(r"^\$ dtrain (.*)\n(.*)$", GOLDEN.read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("words", STORED)
def test_a_mistake_takes_one_line(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert message(words) == STORED[words], "run `python -m tests.unit.tools.test_mistakes` if on purpose"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", ["accept", "bench precision", "probe"])
def test_what_starts_its_own_ranks_refuses_a_launcher(words: str, monkeypatch: Any, capsys: Any) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(words.split()) == 2
    assert "without a launcher" in capsys.readouterr().err


HELP = {
    **{name: f"usage: dtrain {name}" for name in ("bench", "data", "doctor", "plan", "replay", "watch", "checkpoint")},
    "bench engine": "usage: dtrain bench engine",
    **{f"data {name}": f"dtrain data {name}" for name in COMMANDS},
    **{f"plan {name}": f"usage: dtrain plan {name} " for name in ("memory", "precision")},
}


@pytest.mark.parametrize("words", HELP)
def test_help(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert HELP[words].lower() in shown.lower()
    command = words.removeprefix("data ")
    if command in COMMANDS:
        assert all(f"\n  {option.key} " in shown for option in COMMANDS[command].options)


if __name__ == "__main__":
    os.chdir(tempfile.mkdtemp())
    text = "\n".join(f"$ dtrain {words}\n{message(words)}\n" for words in STORED)
    GOLDEN.write_text(text, encoding="utf-8")
