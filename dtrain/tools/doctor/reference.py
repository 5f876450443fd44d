"""Tables of the engines and of the keys, generated from the records that also check every configuration."""

from __future__ import annotations

from importlib.metadata import version

from dtrain.config.capabilities import CAPABILITIES, Capabilities, reasons, table
from dtrain.config.commands import TRAIN
from dtrain.config.keys import Key
from dtrain.tools.tables import Table


def engine_table() -> Table:
    """Returns the capabilities of each engine; the README contains the Markdown."""
    return Table("Engines", ("", *(f"`{name}`" for name in CAPABILITIES)), table())


def engine_tables() -> list[Table]:
    """Returns the capabilities, the reasons of all refusals, and which engines can run on this machine."""
    usable = [(f"`{name}`", _usable(engine)) for name, engine in CAPABILITIES.items()]
    owners: dict[tuple[str, str], list[str]] = {}
    for name, what, why in reasons():
        owners.setdefault((what, why), []).append(f"`{name}`")
    refused = [(f"`{what}`", ", ".join(names), why) for (what, why), names in owners.items()]
    return [
        engine_table(),
        Table("What is refused, and why", ("refused", "by", "because"), refused),
        Table("On this machine", ("engine", "can be used"), usable),
    ]


def _usable(engine: Capabilities) -> str:
    if engine.missing_requirement:
        return f"no, it {engine.missing_requirement}"
    return f"yes, {engine.package} {version(engine.package)}" if engine.package else "yes"


def key_table() -> Table:
    """Returns the keys of ``dtrain train``; docs/running.md holds the Markdown."""
    from dtrain.cli.help import documented_keys  # brings Hydra, which the engines do not need

    rows = [_row(key) for group in documented_keys(TRAIN) for key in group.keys]
    return Table("Keys", ("key", "default", "meaning", "values"), rows)


def _row(key: Key) -> tuple[str, ...]:
    owners = f"`{key.path.partition('.')[0]}={'|'.join(key.options)}` only. " if key.options else ""
    cells = (f"`{key.path}`", f"`{key.default}`" if key.default else "", f"{owners}{key.doc}", key.values)
    return tuple(cell.replace("|", "\\|") for cell in cells)
