"""Rows of a table of modules: those of equal blocks share one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")  # an index within a module's name
_PLACEHOLDER = "#"


def fold(rows: Iterable[tuple[str, ...]], *, folded: bool = True) -> list[tuple[str, ...]]:
    """Returns ``rows``, whose first cell is a module's name; those that differ only in one index share a row.

    Unless ``folded``, only rows that are equal in all cells share one.
    """
    equal: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        pattern = _INDEX.sub(_PLACEHOLDER, name, count=1) if folded else name
        equal.setdefault((pattern, *cells), []).append(name)
    return [(fold_names(pattern, list(dict.fromkeys(names))), *cells) for (pattern, *cells), names in equal.items()]


def fold_names(pattern: str, names: Sequence[str]) -> str:
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
