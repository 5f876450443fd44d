"""YAML whose aliases stand for too much is refused at once, by each command that reads YAML."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dtrain.__main__ import main
from dtrain.config import yaml_files
from dtrain.config.yaml_files import check_size, read_yaml
from dtrain.errors import ConfigError

TENFOLD = (f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12))
BOMB = "\n".join(["a0: &a0 [x, x, x, x, x, x, x, x, x, x]", *TENFOLD])
LONG_CHAIN = "\n".join(["a0: &a0 [x]", *(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 200))])
REFUSED = {
    "lists": (BOMB, "its aliases stand for more than 100,000 values"),
    "mappings": (BOMB.replace("[", "{p: [").replace("]", "]}"), "its aliases stand for more than 100,000 values"),
    "itself": ("a: &a [1, *a]", r"the alias \*a stands for a value that contains it"),
    "deep": ("a: " + "[" * 5000 + "]" * 5000, "more than 100 levels deep"),
    "deep by aliases": (LONG_CHAIN, "more than 100 levels deep"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_it_is_refused_in_a_second_and_named(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, reason = REFUSED[kind]
    file = tmp_path / "model" / "bomb.yaml"
    file.parent.mkdir()
    file.write_text("args:\n" + "\n".join(f"  {line}" for line in text.splitlines()))
    begin = time.process_time()
    with pytest.raises(ConfigError, match=reason):
        read_yaml(file)
    if kind == "lists":
        (tmp_path / "config.yaml").write_text(BOMB)
        assert main(["train", f"--config-dir={tmp_path}", "model=bomb"]) == 2
        assert main(["train", "model=bomb", f"hydra.searchpath=[file://{tmp_path}]"]) == 2
        assert main(["replay", str(tmp_path), "step=1"]) == 2
        files = [file, file, tmp_path / "config.yaml"]
        errors = capsys.readouterr().err.splitlines()
        assert [error.partition(": its aliases stand for")[0] for error in errors] == [f"dtrain: {f}" for f in files]
    assert time.process_time() - begin < 1


def test_ordinary_aliases_and_long_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]\nd: [&unused 1]\n")
    assert read_yaml(file)["b"] == {"x": 1, "y": 2}
    monkeypatch.setattr(yaml_files, "MAX_NODES", 1000)
    check_size(str([0] * 1001), file)
