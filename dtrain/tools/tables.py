"""Prints tables: drawn by rich on a terminal, as Markdown elsewhere, so that a bug report can hold them unchanged."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from rich.console import Console
from rich.table import Table as RichTable

from dtrain.redaction.redact import redact_text

Row = TypeVar("Row")
Column: TypeAlias = tuple[str, Callable[[Row], str]]
"""A column's title, and the function that gives a row's text in it."""

_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")  # an index within a module's name
_PLACEHOLDER = "#"


@dataclass(frozen=True)
class Table:
    """Rows of text under a title. Text between backticks is what a user types."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    @classmethod
    def of(cls, title: str, columns: Sequence[Column[Row]], rows: Sequence[Row]) -> Table:
        texts = [tuple(cell(row) for _, cell in columns) for row in rows]
        return cls(title, tuple(name for name, _ in columns), texts)

    def markdown(self) -> str:
        """Returns the table without its title, its columns aligned."""
        lines = [self.columns, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.columns))]
        header, *rows = (
            "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
            for line in lines
        )
        rule = "| " + " | ".join("-" * width for width in widths) + " |"
        return "\n".join([header, rule, *rows])


def show(tables: Sequence[Table]) -> None:
    """Prints the tables without secrets, which a user's command or the reason of a failure may hold."""
    console = Console(markup=False, highlight=False)
    for table in tables:
        if not sys.stdout.isatty():
            print(redact_text(f"## {table.title}\n\n{table.markdown()}\n"), flush=True)
            continue
        drawn = RichTable(title=table.title, title_justify="left", show_lines=len(table.columns) > 3)
        for name in table.columns:
            drawn.add_column(_without_backticks(name))
        for row in table.rows:
            drawn.add_row(*(redact_text(_without_backticks(cell)) for cell in row))
        console.print(drawn)


def fold(rows: Iterable[tuple[str, ...]], *, folded: bool = True) -> list[tuple[str, ...]]:
    """Returns ``rows``, whose first cell is a module's name; those that differ only in one index share a row.

    Unless ``folded``, only rows that are equal in all cells share one.
    """
    equal: dict[tuple[str, ...], dict[str, None]] = {}
    for name, *cells in rows:
        pattern = _INDEX.sub(_PLACEHOLDER, name, count=1) if folded else name
        equal.setdefault((pattern, *cells), {})[name] = None
    return [(_joined(pattern, list(names)), *cells) for (pattern, *cells), names in equal.items()]


def _joined(pattern: str, names: Sequence[str]) -> str:
    """Returns ``pattern`` with the indices of ``names`` instead of its placeholder."""
    if len(names) == 1:
        return names[0] or "(the model)"
    runs: list[list[int]] = []
    for index in sorted(int(found[0]) for name in names if (found := _INDEX.search(name))):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return pattern.replace(_PLACEHOLDER, ",".join(f"{run[0]}-{run[-1]}" if run[1:] else str(run[0]) for run in runs))


def plural(count: int, noun: str) -> str:
    """Returns ``1 rank``, ``2 ranks``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _without_backticks(text: str) -> str:
    return text.replace("`", "")
