from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.__main__ import main
from tests.unit.cli.regenerate_golden import message, stored_messages

STORED = stored_messages()


@pytest.fixture(autouse=True)
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> int:
        raise AssertionError("training started")

    monkeypatch.setattr("dtrain.train.run.run_training", refuse)


@pytest.mark.parametrize("arguments", STORED)
def test_golden_message(arguments: str) -> None:
    assert message(arguments) == STORED[arguments], "run `python -m tests.unit.cli.regenerate_golden` if on purpose"


ENVIRONMENTS = {
    "RANK=0 WORLD_SIZE=3": (
        "train train.global_batch_size=64",
        "train.global_batch_size=64 does not divide by train.micro_batch_size=8 x 3 ranks; the nearest that do: 48 or",
    ),
    "RANK=1": ("train", "the environment sets RANK but not WORLD_SIZE; a launcher sets both, or unset RANK"),
    "DTRAIN_PRECISION=bf17": ("train", "DTRAIN_PRECISION=bf17 in the environment is not a precision; did you mean"),
    "DTRAIN_PRECISION=nvfp4": ("train", "DTRAIN_PRECISION=nvfp4 in the environment: nvfp4 needs the FP4"),
}


@pytest.mark.parametrize("variables", ENVIRONMENTS)
def test_mistakes_of_the_environment(variables: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, start = ENVIRONMENTS[variables]
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("=", 1))
    assert message(arguments).startswith(start)


GLOBAL = "# @package _global_\ndefaults:\n  - override"
FILES = {
    "model/unknown": ("hidden_dimm: 3", "unknown key 'model.hidden_dimm'; did you mean 'model.hidden_dim'? (in {})"),
    "model/wrong": ("hidden_dim: abc", "model.hidden_dim=abc is not a whole number (in {})"),
    "model/broken": ("hidden_dim: [", 'model/broken.yaml", line 2, column 1'),
    "experiment/group": (f"{GLOBAL} /modle: tiny", "no group 'modle' to override; did you mean 'model'? (in {})"),
    "experiment/option": (f"{GLOBAL} /model: tinny", "unknown option 'model=tinny'; did you mean 'model=tiny'?"),
    "config-name/mine": ("seed: 3", "mine.yaml lacks the schema; begin its defaults list with 'train'"),
}
"""Option, content of its file, and the end of the message."""


@pytest.mark.parametrize("option", FILES)
def test_mistakes_in_yaml_name_the_file(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, line = FILES[option]
    group, name = option.split("/")
    chosen = ["--config-name", name] if group == "config-name" else [f"{group}={name}"]
    path = tmp_path / (f"{name}.yaml" if group == "config-name" else f"{option}.yaml")
    path.parent.mkdir(exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
    assert main(["train", "--config-dir", str(tmp_path), *chosen]) == 2
    (shown,) = capsys.readouterr().err.splitlines()
    assert shown.startswith("dtrain: ")
    assert shown.endswith(line.format(f"{option}.yaml"))
