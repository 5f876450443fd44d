"""Directories that other jobs create and remove at the same time."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dtrain.checkpoint import shared_folder, storage
from dtrain.checkpoint.directory import make_directories


def test_a_directory_that_another_job_removes_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other job creates it just before this one, and removes it and its parent before this one looks."""
    monkeypatch.setattr(shared_folder, "LIMIT_S", 0.5)
    path = tmp_path / "run" / "checkpoints"
    make = storage.make_directory
    waits: list[int] = []

    def make_late(created: Path) -> None:
        if created == path and not waits:
            path.parent.rmdir()
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        make(created)

    monkeypatch.setattr(storage, "make_directory", make_late)
    make_directories(path, lambda: waits.append(1))
    assert path.is_dir()
    assert waits == [1]


def test_a_file_in_the_way_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(NotADirectoryError, match="run"):
        make_directories(tmp_path / "run" / "checkpoints")
