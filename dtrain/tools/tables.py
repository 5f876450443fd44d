"""Tables for people: drawn on a terminal, Markdown elsewhere, so that a report of a fault can hold them as they are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from rich.console import Console
from rich.table import Table as RichTable

Row = TypeVar("Row")
Column: TypeAlias = tuple[str, Callable[[Row], str]]
"""A title, and a row's text under it."""


def markdown_table(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> str:
    """A Markdown table, its columns aligned."""
    lines = [[title for title, _ in columns], *([cell(row) for _, cell in columns] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
    texts = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    rule = "| " + " | ".join("-" * width for width in widths) + " |"
    return "\n".join([texts[0], rule, *texts[1:]])


@dataclass(frozen=True)
class Table:
    """Rows of text under a title; text between backticks is what a user types."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def markdown(self) -> str:
        """The table without its title."""
        columns: list[Column[tuple[str, ...]]] = [
            (name, lambda row, index=index: row[index])  # type: ignore[misc]
            for index, name in enumerate(self.columns)
        ]
        return markdown_table(columns, self.rows)


def show(tables: Sequence[Table]) -> None:
    """Prints the tables."""
    console = Console(markup=False, highlight=False)
    for table in tables:
        if not sys.stdout.isatty():
            print(f"## {table.title}\n\n{table.markdown()}\n", flush=True)
            continue
        drawn = RichTable(title=table.title, title_justify="left", show_lines=len(table.columns) > 3)
        for name in table.columns:
            drawn.add_column(_plain(name))
        for row in table.rows:
            drawn.add_row(*map(_plain, row))
        console.print(drawn)


def _plain(text: str) -> str:
    return text.replace("`", "")
