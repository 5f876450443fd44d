"""Stored texts under ``golden/``: resolved configurations, and the messages of mistakes on the command line.

A changed default or message shows up as a changed line. After a change on purpose, run
``python -m tests.unit.cli.regenerate_golden`` and read the diff. It also rewrites the tables of ``docs/running.md``
and ``README.md`` that are generated from the configuration.
"""

from __future__ import annotations

import re
from pathlib import Path

from dtrain.cli.compose import config_folder
from dtrain.cli.resolve import compose
from dtrain.config.dump import config_to_dict, to_yaml
from dtrain.tools.doctor.reference import engine_table, key_table
from tests.unit.cli.mistakes import CASES, message

GOLDEN = Path(__file__).parent / "golden"
MESSAGES = GOLDEN / "messages.txt"
ROOT = Path(__file__).parents[3]
TABLES = {"engines": (ROOT / "README.md", engine_table), "keys": (ROOT / "docs/running.md", key_table)}
"""Tables in documents, by the name between their markers; ``dtrain doctor NAME | cat`` prints each."""


def cases() -> dict[str, list[str]]:
    """Name of the golden file -> its overrides: the default run, and every experiment and debug option."""
    found = {"default": []}
    for group in ("experiment", "debug"):
        for path in sorted((config_folder() / group).glob("*.yaml")):
            found[f"{group}-{path.stem}"] = [f"{group}={path.stem}"]
    return found


def resolved(overrides: list[str]) -> str:
    return to_yaml(config_to_dict(compose(overrides)))


def all_messages() -> str:
    return "\n".join(f"$ dtrain train {arguments}\n{message(arguments)}\n" for arguments in CASES)


def table_in(document: Path, name: str) -> re.Match[str]:
    """The generated table of a document, between its markers."""
    text = document.read_text(encoding="utf-8")
    found = re.search(rf"(?<=<!-- {name} -->\n).*?(?=\n<!-- end {name} -->)", text, re.DOTALL)
    assert found is not None, f"{document} has no table of {name}"
    return found


if __name__ == "__main__":
    for stale in GOLDEN.glob("*.yaml"):
        stale.unlink()
    for name, overrides in cases().items():
        (GOLDEN / f"{name}.yaml").write_text(resolved(overrides), encoding="utf-8")
    MESSAGES.write_text(all_messages(), encoding="utf-8")
    for name, (document, table) in TABLES.items():
        old = table_in(document, name)
        document.write_text(old.string[: old.start()] + table().markdown() + old.string[old.end() :], encoding="utf-8")
