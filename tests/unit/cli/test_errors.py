"""Every mistake on the command line: one line that names the key and the fix, exit code 2, no training."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.__main__ import main
from tests.unit.cli.mistakes import CASES, message
from tests.unit.cli.regenerate_golden import MESSAGES, all_messages


@pytest.fixture(autouse=True)
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> int:
        raise AssertionError("training started")

    monkeypatch.setattr("dtrain.train.run.run_training", refuse)


def fails_with(line: str, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["train", *argv])
    captured = capsys.readouterr()
    assert (code, captured.err, captured.out) == (2, f"dtrain: {line}\n", "")


@pytest.mark.parametrize("arguments", CASES)
def test_one_line_names_key_and_fix(arguments: str) -> None:
    line = message(arguments)
    assert not [fact for fact in CASES[arguments] if fact not in line], line


def test_golden_messages() -> None:
    stored = MESSAGES.read_text(encoding="utf-8")
    assert all_messages() == stored, "run `python -m tests.unit.cli.regenerate_golden` if this is on purpose"


def test_batch_that_the_ranks_cannot_share(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    line = "train.global_batch_size=64 does not divide by train.micro_batch_size=8 x 3 ranks"
    fails_with(f"{line}; the nearest that do: 48 or 72", ["train.global_batch_size=64"], capsys)


def test_half_a_launcher_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    line = "the environment sets RANK but not WORLD_SIZE; a launcher sets both, or unset RANK"
    fails_with(line, [], capsys)


FILES = {
    "model/unknown.yaml": (
        "hidden_dimm: 3",
        "unknown key 'model.hidden_dimm'; did you mean 'model.hidden_dim'? (in {})",
    ),
    "model/wrong.yaml": ("hidden_dim: abc", "model.hidden_dim=abc is not a whole number (in {})"),
    "experiment/group.yaml": (
        "# @package _global_\ndefaults:\n  - override /modle: tiny",
        "no group 'modle' to override; did you mean 'model'? (in {})",
    ),
    "experiment/option.yaml": (
        "# @package _global_\ndefaults:\n  - override /model: tinny",
        "unknown option 'model=tinny'; did you mean 'model=tiny'?",
    ),
}


@pytest.mark.parametrize("name", sorted(FILES))
def test_mistakes_in_yaml_name_the_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, line = FILES[name]
    path = tmp_path / name
    path.parent.mkdir()
    path.write_text(text + "\n", encoding="utf-8")
    fails_with(line.format(name), ["--config-dir", str(tmp_path), f"{path.parent.name}={path.stem}"], capsys)


def test_broken_yaml_is_one_line_with_the_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/broken.yaml").write_text("hidden_dim: [\n", encoding="utf-8")
    assert main(["train", "--config-dir", str(tmp_path), "model=broken"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dtrain: ")
    assert line.endswith('model/broken.yaml", line 2, column 1')


def test_primary_config_without_the_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text("seed: 3\n", encoding="utf-8")
    line = "mine.yaml lacks the schema; begin its defaults list with 'train'"
    fails_with(line, ["--config-dir", str(tmp_path), "--config-name", "mine"], capsys)
