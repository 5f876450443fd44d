"""The keys of ``dtrain train``, from the metadata of their fields."""

from __future__ import annotations

from dtrain.cli.help import documented_keys
from dtrain.config.commands import TRAIN
from dtrain.config.keys import Key
from dtrain.tools.tables import Table


def key_table() -> Table:
    """Every key with its default, its meaning and its values; docs/running.md holds its Markdown."""
    rows = [_row(key) for group in documented_keys(TRAIN) for key in group.keys]
    return Table("Keys", ("key", "default", "meaning", "values"), rows)


def _row(key: Key) -> tuple[str, ...]:
    owners = f"`{key.path.partition('.')[0]}={'|'.join(key.options)}` only. " if key.options else ""
    cells = (f"`{key.path}`", f"`{key.default}`" if key.default else "", f"{owners}{key.doc}", key.values)
    return tuple(cell.replace("|", "\\|") for cell in cells)
