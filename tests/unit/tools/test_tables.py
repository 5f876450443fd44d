"""Tables for people: Markdown in a pipe, drawn on a terminal."""

from __future__ import annotations

import sys

import pytest

from dtrain.tools.tables import Table, plural, show

TABLE = Table.of("Sizes", [("name", str), ("`length`", lambda row: str(len(row)))], ["a", "four"])


def test_markdown_columns_are_aligned() -> None:
    assert TABLE.markdown() == "\n".join(
        [
            "| name | `length` |",
            "| ---- | -------- |",
            "| a    | 1        |",
            "| four | 4        |",
        ]
    )


def test_a_terminal_gets_a_drawn_table_without_backticks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show([TABLE])
    assert capsys.readouterr().out == f"## Sizes\n\n{TABLE.markdown()}\n\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show([TABLE])
    out = capsys.readouterr().out
    assert "Sizes" in out
    assert "length" in out
    assert "`" not in out
    assert "|" not in out


def test_plural() -> None:
    assert (plural(1, "rank"), plural(2, "rank")) == ("1 rank", "2 ranks")
