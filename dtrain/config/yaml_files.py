"""Reads YAML that a user or a run directory supplies, unless its aliases make it huge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from dtrain.errors import ConfigError

MAX_NODES = 100_000
"""Values for which the aliases of a file may stand; a run's configuration has a few hundred in all."""
MAX_DEPTH = 100
"""Levels of a file: libraries read each inside the one before, and Python ends at about a thousand calls."""

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(path: Path) -> Any:
    """Returns the content of a YAML file.

    Raises:
        ConfigError: its aliases stand for too many values.
        yaml.YAMLError: it is not YAML.
        OSError: it cannot be read.
    """
    text = path.read_text(encoding="utf-8")
    check_size(text, path)
    return yaml.safe_load(text)


def check_size(text: str, file: object) -> None:
    """Checks the number and the depth of the values of ``text``, in time linear in its length.

    An alias costs a few characters and stands for all values of its anchor, whose own aliases stand for more: ten
    lines can describe more values than fit into any memory.

    Raises:
        ConfigError: aliases stand for more than ``MAX_NODES`` values, one stands for what contains it, or there are
            more than ``MAX_DEPTH`` levels.
        yaml.YAMLError: it is not YAML.
    """
    sizes: dict[str | None, int] = {}
    depths: dict[str | None, int] = {}
    num_written = 0
    open_nodes: list[tuple[str | None, int, int]] = []  # anchor, values and levels so far
    for event in yaml.parse(text, Loader=_Loader):
        num_written += 1
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, 1, 1))
            _check_depth(len(open_nodes), file)
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size, depth = open_nodes.pop()
        elif isinstance(event, yaml.ScalarEvent):
            anchor, size, depth = event.anchor, 1, 1
        elif isinstance(event, yaml.AliasEvent):
            if any(event.anchor == anchor for anchor, _, _ in open_nodes):
                raise ConfigError(f"{file}: the alias *{event.anchor} stands for a value that contains it")
            # an unknown anchor is the loader's to report
            anchor, size, depth = None, sizes.get(event.anchor, 1), depths.get(event.anchor, 1)
        else:
            continue
        if anchor is not None:
            sizes[anchor], depths[anchor] = size, depth
        if open_nodes:
            parent, before, deepest = open_nodes[-1]
            open_nodes[-1] = (parent, before + size, max(deepest, depth + 1))
            _check_depth(len(open_nodes) + depth, file)
            if before + size > MAX_NODES + num_written:
                raise ConfigError(
                    f"{file}: its aliases stand for more than {MAX_NODES:,} values; write out what they stand for, or "
                    "check where the file comes from"
                )


def _check_depth(depth: int, file: object) -> None:
    if depth > MAX_DEPTH:
        raise ConfigError(f"{file}: its values lie more than {MAX_DEPTH} levels deep")
