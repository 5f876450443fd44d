from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dtrain.__main__ import main
from dtrain.tools.data.cli import COMMANDS


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("tokenise", "dtrain data has no command 'tokenise'; did you mean 'tokenize'?"),
        ("tokenize file=x", "dtrain data tokenize has no key 'file'; did you mean 'files'?"),
        ("tokenize a.txt b.txt", "dtrain data tokenize cannot read 'a.txt'; expected key=value, with the keys files, "),
        ("tokenize files=a files=b", "dtrain data tokenize: files is given twice; quote a glob"),
        ("tokenize files=a out=b", "dtrain data tokenize needs tokenizer=..., such as dtrain data tokenize files="),
        ("tokenize workers=0", "dtrain data tokenize: workers=0; expected a whole number from 1"),
        ("tokenize append_end=maybe", "dtrain data tokenize: append_end=maybe; expected true or false"),
        ("tokenize out=", "dtrain data tokenize: out=; expected a path"),
        ("verify", "dtrain data verify takes a folder: dtrain data verify tokens/"),
        ("info vocab_size=3", "dtrain data info takes a folder"),
        ("info nowhere", "nowhere is not a folder"),
        ("train-tokenizer files=x out=y vocab_size=3", "vocab_size=3; expected at least 257"),
    ],
)
def test_mistakes_take_one_line(capsys: pytest.CaptureFixture[str], words: str, expected: str) -> None:
    assert main(["data", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"dtrain: {expected}")
    assert err.count("\n") == 1


def test_help_lists_commands_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "--help"]) == 0
    usage = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"\n  {name} " in usage
        assert main(["data", name, "--help"]) == 0
        shown = capsys.readouterr().out
        assert all(f"\n  {option.key} " in shown for option in command.options)


def test_values_reach_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr("dtrain.tools.data.tokenize.run", lambda values: seen.append(dict(values)) or 7)
    assert main(["data", "tokenize", "files=a=b", "tokenizer=t", "out=o/", "workers=3", "append_end=false"]) == 7
    assert seen[0] == {
        "files": "a=b",
        "tokenizer": Path("t"),
        "out": Path("o"),
        "text_key": "text",
        "workers": 3,
        "append_end": False,
        "end_token": None,
    }
