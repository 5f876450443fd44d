"""What ``--help`` prints of every key, and the same keys in the documents."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from dtrain.__main__ import main
from dtrain.cli.help import documented_keys
from dtrain.config.commands import PRIMARIES, TRAIN, Primary
from dtrain.config.dump import config_to_dict
from dtrain.config.schema import GROUP_OPTIONS
from tests.unit.cli.regenerate_golden import TABLES, table_in

COMMANDS = [*((primary, primary.command.split()) for primary in PRIMARIES), (TRAIN, ["plan", "precision"])]


def paths(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        free = f"{prefix}{name}" in ("model.args", "precision.rules")
        if isinstance(value, dict) and not free:
            yield from paths(value, f"{prefix}{name}.")
        elif name != "name":
            yield f"{prefix}{name}"


def records(record: type[Any]) -> Iterator[type[Any]]:
    yield record
    for item in fields(record):
        if is_dataclass(item.default_factory):
            yield from records(item.default_factory)  # type: ignore[arg-type]


@pytest.mark.parametrize("primary", PRIMARIES, ids=lambda primary: primary.name)
def test_every_key_is_documented(primary: Primary[Any]) -> None:
    listed = {key.path: key for group in documented_keys(primary) for key in group.keys}
    assert set(paths(config_to_dict(primary.schema()))) <= listed.keys()
    assert not [key.path for key in listed.values() if not key.doc]
    options = [option for group in GROUP_OPTIONS.values() for option in group.values()]
    for record in (kind for root in [primary.schema, *options] for kind in records(root)):
        missing = [item.name for item in fields(record) if item.name != "name" and not item.metadata.get("doc")]
        assert not missing, record


@pytest.mark.parametrize(("primary", "words"), COMMANDS, ids=[" ".join(words) for _, words in COMMANDS])
def test_help_lists_every_key(primary: Primary[Any], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: dtrain {' '.join(words)} ")
    assert not [key.path for group in documented_keys(primary) for key in group.keys if f"  {key.path}=" not in shown]


def test_help_shows_default_meaning_values_and_owner(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "  train.steps=200                 Steps to attempt; skipped steps count. [at least 1]" in shown
    titles = [line for line in shown.splitlines() if line.isalpha()]
    assert titles == ["run", *(group.name for group in documented_keys(TRAIN) if group.name)]
    facts = [
        "[native, fsdp2, deepspeed, ddp]",
        "2 (ddp: 0)",
        "[engine=native|deepspeed only]",
        "schedule=cosine|linear|wsd",
    ]
    assert not [fact for fact in facts if fact not in shown]


def test_help_shows_the_values_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help", "model=gpt2-124m", "engine=ddp"]) == 0
    shown = capsys.readouterr().out
    for entry in ("  model=gpt2-124m ", "  model.num_layers=12 ", "  engine=ddp ", "  engine.zero_stage=0 "):
        assert entry in shown
    assert main(["parity", "--help"]) == 0
    assert "  optim.lr=0.0003 " in capsys.readouterr().out


@pytest.mark.processes
def test_help_imports_no_torch() -> None:
    code = "import sys; from dtrain.__main__ import main; main(['train', '--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", TABLES)
def test_documents_have_the_generated_table(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    document, table = TABLES[name]
    assert table_in(document, name)[0] == table().markdown(), "python -m tests.unit.cli.regenerate_golden"
    assert main(["doctor", name]) == 0
    assert table().markdown() in capsys.readouterr().out
