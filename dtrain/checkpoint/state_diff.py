"""How two states that are plain JSON differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StateDifference:
    """A value of the state that is not the same: its path in the manifest's JSON and both values, None where absent."""

    path: str
    a: Any
    b: Any


def state_differences(a: Any, b: Any, path: str = "") -> Iterator[StateDifference]:
    """What differs between two plain JSON values; the paths begin with ``path``."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in [*a, *(key for key in b if key not in a)]:
            yield from state_differences(a.get(key), b.get(key), f"{path}.{key}" if path else key)
    elif a != b or isinstance(a, bool) != isinstance(b, bool):
        yield StateDifference(path, a, b)
