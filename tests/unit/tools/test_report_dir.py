"""The directory of a report."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.errors import ConfigError
from dtrain.tools.report_dir import make_run_dir


def test_without_a_name_the_tool_and_the_time_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = make_run_dir(None, "probe")
    assert path.is_dir()
    assert path.is_absolute()
    assert path.parent == tmp_path / "runs"
    assert path.name.startswith("probe-20")


def test_an_empty_one_is_taken_and_a_missing_one_created(tmp_path: Path) -> None:
    assert make_run_dir(str(tmp_path), "probe") == tmp_path
    assert make_run_dir(str(tmp_path / "a/b"), "parity").is_dir()


def test_files_of_a_run_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    with pytest.raises(ConfigError, match=r"run_dir=.* is not empty; choose a new folder"):
        make_run_dir(str(tmp_path), "probe")
    assert (tmp_path / "config.yaml").read_text() == "seed: 1\n"


def test_a_file_in_its_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be created: .*; choose another"):
        make_run_dir(str(tmp_path / "file"), "probe")
