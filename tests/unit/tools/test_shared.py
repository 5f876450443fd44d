from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dtrain.errors import ConfigError
from dtrain.tools.command import command_text
from dtrain.tools.report_dir import make_run_dir
from dtrain.tools.tables import Table, plural, show


def test_a_table_is_markdown_in_a_pipe_and_drawn_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Table.of("Sizes", [("name", str), ("`length`", lambda row: str(len(row)))], ["a", "four"])
    markdown = "| name | `length` |\n| ---- | -------- |\n| a    | 1        |\n| four | 4        |"
    show([table])
    assert capsys.readouterr().out == f"## Sizes\n\n{markdown}\n\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show([table])
    out = capsys.readouterr().out
    assert "Sizes" in out
    assert "length" in out
    assert not set("`|") & set(out)
    assert (plural(1, "rank"), plural(2, "rank")) == ("1 rank", "2 ranks")


WORDS = {
    "model.args.api_key=abc": "'model.args.api_key=***'",
    "+model.args.token=abc": "'+model.args.token=***'",
    "model.args.secrets.name=abc": "'model.args.secrets.name=***'",
    "model.args={a: 1, hf_token: abc}": "'model.args=***'",
    "data.url=https://me:abc@example.org/x": "'data.url=https://***@example.org/x'",
    "model.args.max_tokens=4096": "model.args.max_tokens=4096",
    "formats=[bf16,fp8]": "'formats=[bf16,fp8]'",
    "-m": "-m",
}


@pytest.mark.parametrize("word", WORDS)
def test_secrets_of_a_command_are_blanked_and_the_rest_can_be_pasted(word: str) -> None:
    assert command_text("probe", [word, "steps=20"]) == f"dtrain probe {WORDS[word]} steps=20"


def test_the_folder_of_a_report_is_new_or_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = make_run_dir(None, "probe")
    assert (path.parent, path.is_dir(), path.is_absolute()) == (tmp_path / "runs", True, True)
    assert path.name.startswith("probe-20")
    assert make_run_dir(str(tmp_path / "a/b"), "parity") == make_run_dir(str(tmp_path / "a/b"), "probe")
    with pytest.raises(ConfigError, match=r"run_dir=.* is not empty; choose a new folder"):
        make_run_dir(str(tmp_path), "probe")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be created: .*; choose another"):
        make_run_dir(str(tmp_path / "file"), "probe")
