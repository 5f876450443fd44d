"""The engines against each other, from the table that also checks every configuration."""

from __future__ import annotations

from importlib.metadata import version

from dtrain.config.capabilities import CAPABILITIES, Capabilities, reasons, table
from dtrain.tools.tables import Table


def engine_table() -> Table:
    """What each engine can do; the README holds its Markdown."""
    return Table("Engines", ("", *(f"`{name}`" for name in CAPABILITIES)), [(row.title, *row.cells) for row in table()])


def engine_tables() -> list[Table]:
    """What each engine can do, why it cannot do the rest, and which of them can be used here."""
    here = [(f"`{name}`", _usable(engine)) for name, engine in CAPABILITIES.items()]
    owners: dict[tuple[str, str], list[str]] = {}
    for name, what, why in reasons():
        owners.setdefault((what, why), []).append(f"`{name}`")
    refused = [(f"`{what}`", ", ".join(names), why) for (what, why), names in owners.items()]
    return [
        engine_table(),
        Table("What is refused, and why", ("refused", "by", "because"), refused),
        Table("On this machine", ("engine", "can be used"), here),
    ]


def _usable(engine: Capabilities) -> str:
    if engine.missing_requirement:
        return f"no, it {engine.missing_requirement}"
    return f"yes, {engine.package} {version(engine.package)}" if engine.package else "yes"
