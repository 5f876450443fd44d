"""Differences between two checkpoint states (plain JSON)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StateDifference:
    """A value that differs: its path in the manifest's JSON and both values, None if absent."""

    path: str
    a: Any
    b: Any


def state_differences(a: Any, b: Any, path: str = "") -> Iterator[StateDifference]:
    """Yields the differences between two plain JSON values; their paths begin with ``path``."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in [*a, *(key for key in b if key not in a)]:
            yield from state_differences(a.get(key), b.get(key), f"{path}.{key}" if path else key)
    elif a != b or isinstance(a, bool) != isinstance(b, bool):
        yield StateDifference(path, a, b)
