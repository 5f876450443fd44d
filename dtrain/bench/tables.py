"""What all tables of results are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import TypeAlias, TypeVar

from dtrain.bench.records import Entry, Host

Row = TypeVar("Row")
Column: TypeAlias = tuple[str, Callable[[Row], str]]
"""A title, and a row's text under it."""


def table(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> str:
    """A Markdown table, its columns aligned."""
    lines = [[title for title, _ in columns], *([cell(row) for _, cell in columns] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
    texts = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    rule = "| " + " | ".join("-" * width for width in widths) + " |"
    return "\n".join([texts[0], rule, *texts[1:]])


def spread(values: Sequence[float], digits: int) -> str:
    """Median (least to most)."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def ratios(entry: Entry, baseline: Entry) -> list[float]:
    """``entry``'s step time over ``baseline``'s in each round, medians of the turns."""
    pairs = zip(entry.turns, baseline.turns, strict=True)
    return [median(own.step_ms) / median(other.step_ms) for own, other in pairs]


def describe_machine(host: Host) -> str:
    """Machine and software in one line."""
    gpus = "".join(f", {name}" for name in host.gpus)
    peers = "".join(f", {name} {number}" for name, number in host.peers.items())
    return (
        f"{host.cpu}, {host.cores} cores, {host.memory_gib:g} GiB{gpus}, {host.system}; Python {host.python}, torch "
        f"{host.torch}, dtrain {host.dtrain}{peers}"
    )
