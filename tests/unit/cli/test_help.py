from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from dtrain.__main__ import main
from dtrain.cli.help import documented_keys, help_text
from dtrain.config.commands import PRIMARIES, TRAIN, Primary
from dtrain.config.dump import config_to_dict
from tests.unit.cli.regenerate_golden import TABLES, flat, table_in


@pytest.mark.parametrize("primary", PRIMARIES, ids=lambda primary: primary.name)
def test_every_key_is_documented_and_shown(primary: Primary[Any]) -> None:
    listed = {key.path: key for group in documented_keys(primary) for key in group.keys}
    keys = [key for key, _ in flat(config_to_dict(primary.schema())) if not f".{key}".endswith(".name")]
    assert set(keys) <= listed.keys()
    assert not [key.path for key in listed.values() if not key.doc]
    shown = help_text(primary, primary.schema())
    assert shown.startswith(f"usage: dtrain {primary.command} ")
    assert not [path for path in listed if f"  {path}=" not in shown]


def test_help_shows_default_meaning_values_and_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    shown = help_text(TRAIN, TRAIN.schema())
    titles = [line for line in shown.splitlines() if line.isalpha()]
    assert titles == ["run", *(group.name for group in documented_keys(TRAIN) if group.name)]
    facts = ["[native, fsdp2, deepspeed, ddp]", "2 (ddp: 0)", "[engine=native|deepspeed only]"]
    facts.append("  train.steps=200                 Steps to attempt; skipped steps count. [at least 1]")
    facts.append("schedule=cosine|linear|wsd")
    assert not [fact for fact in facts if fact not in shown]


@pytest.mark.parametrize(
    ("argv", "entries"),
    [
        ("train model=gpt2-124m engine=ddp", ("model=gpt2-124m", "model.num_layers=12", "engine=ddp")),
        ("plan precision engine.zero_stage=0", ("engine.zero_stage=0",)),
        ("parity", ("optim.lr=0.0003",)),
    ],
)
def test_help_shows_the_command_line(argv: str, entries: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    command = " ".join(word for word in argv.split() if "=" not in word)
    assert main([*argv.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: dtrain {command} ")
    assert not [entry for entry in entries if f"  {entry} " not in shown]


@pytest.mark.parametrize("name", TABLES)
def test_documents_have_the_generated_table(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    document, table = TABLES[name]
    assert table_in(document, name)[0] == table().markdown(), "python -m tests.unit.cli.regenerate_golden"
    if (topic := name.split()[-1]) != "records":
        assert main(["doctor", topic]) == 0
        assert TABLES[topic][1]().markdown() in capsys.readouterr().out


@pytest.mark.processes
def test_a_reader_may_end_early() -> None:
    script = "import sys; from dtrain.__main__ import main; sys.exit(main())"  # what the command runs
    argv = [sys.executable, "-c", script, "train", "--help"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # as head does
        assert process.stderr.read() == ""
