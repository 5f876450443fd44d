"""Stored texts under ``golden/``: what experiments change of the default run, and the messages of mistakes.

A changed value or message shows up as a changed line. After a change on purpose, run
``python -m tests.unit.cli.regenerate_golden`` and read the diff. A new mistake is a line ``$ dtrain ...`` in
``messages.txt``. It also rewrites the tables of ``docs/reference`` and ``README.md`` that are generated from the
configuration.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import fields
from io import StringIO
from pathlib import Path
from typing import Any

import dtrain
from dtrain.__main__ import main
from dtrain.cli.compose import config_folder
from dtrain.cli.resolve import compose
from dtrain.config.dump import config_to_dict, to_yaml
from dtrain.config.fields import CheckedRecord, default_of, written
from dtrain.config.schema import RunConfig
from dtrain.tools.doctor.reference import engine_table, key_table
from dtrain.tools.tables import Table

GOLDEN = Path(__file__).parent / "golden"
EXPERIMENTS, MESSAGES = GOLDEN / "experiments.yaml", GOLDEN / "messages.txt"
ROOT = Path(__file__).parents[3]
REFERENCE = ROOT / "docs/reference"


def record_table() -> Table:
    """Returns the fields of the public records: what a script gives in place of keys."""
    found = [getattr(dtrain, name) for name in dtrain.__all__]
    records = [each for each in found if isinstance(each, type) and issubclass(each, CheckedRecord)]
    rows = [
        (f"`{record.__name__}`", f"`{item.name}`", f"`{written(default_of(item))}`", item.metadata["doc"])
        for record in records
        for item in fields(record)
        if item.metadata.get("doc")
    ]
    return Table("Records", ("record", "field", "default", "meaning"), rows)


TABLES = {
    "main engines": (ROOT / "README.md", lambda: engine_table(main=True)),
    "engines": (REFERENCE / "engines.md", engine_table),
    "keys": (REFERENCE / "keys.md", key_table),
    "records": (REFERENCE / "records.md", record_table),
}
"""Tables in documents, by the name between their markers; ``dtrain doctor NAME | cat`` prints each."""


def experiments() -> str:
    """Returns what each experiment and debug option changes of the default run."""
    plain = dict(flat(config_to_dict(RunConfig())))
    found = {}
    for group in ("experiment", "debug"):
        for path in sorted((config_folder() / group).glob("*.yaml")):
            values = flat(config_to_dict(compose([f"{group}={path.stem}"])))
            found[f"{group}={path.stem}"] = {key: value for key, value in values if plain.get(key, ...) != value}
    return to_yaml(found)


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def stored_messages() -> dict[str, str]:
    """Returns the messages by command line, without the name of the program in front of either."""
    return dict(re.findall(r"^\$ dtrain (.*)\n(.*)$", MESSAGES.read_text(encoding="utf-8"), re.MULTILINE))


def message(arguments: str) -> str:
    """Returns the error of ``dtrain ARGUMENTS``."""
    captured = StringIO()
    with redirect_stderr(captured):
        code = main(arguments.split())
    (line,) = captured.getvalue().splitlines()
    assert code == 2, line
    assert line.startswith("dtrain: ")
    return line.removeprefix("dtrain: ")


def table_in(document: Path, name: str) -> re.Match[str]:
    """The generated table of a document, between its markers."""
    text = document.read_text(encoding="utf-8")
    found = re.search(rf"(?<=<!-- {name} -->\n).*?(?=\n<!-- end {name} -->)", text, re.DOTALL)
    assert found is not None, f"{document} has no table of {name}"
    return found


if __name__ == "__main__":
    EXPERIMENTS.write_text(experiments(), encoding="utf-8")
    messages = "\n".join(f"$ dtrain {arguments}\n{message(arguments)}\n" for arguments in stored_messages())
    MESSAGES.write_text(messages, encoding="utf-8")
    for name, (document, table) in TABLES.items():
        old = table_in(document, name)
        document.write_text(old.string[: old.start()] + table().markdown() + old.string[old.end() :], encoding="utf-8")
