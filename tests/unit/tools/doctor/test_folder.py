"""``dtrain doctor folder``: each property that a folder lacks is found."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtrain.__main__ import main
from dtrain.checkpoint import shared_folder, storage
from dtrain.errors import CheckpointError, ConfigError
from dtrain.tools.doctor import folder
from dtrain.tools.doctor.folder import answer, check_folder


def results(path: Path, *, other_host: bool = True) -> tuple[list[str], bool]:
    table, is_good = check_folder(path, other_host=other_host)
    assert os.listdir(path) == []
    return [row[1] for row in table.rows], is_good


def with_answers(path: Path, problems: list[Exception] | None = None) -> tuple[list[str], bool]:
    """The other host is a thread, whose error is added to ``problems``."""
    problems = [] if problems is None else problems

    def other() -> None:
        try:
            answer(path)
        except Exception as error:
            problems.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        return results(path)
    finally:
        thread.join()


@pytest.mark.processes
def test_a_local_folder_has_all_properties(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "folder", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.count("| yes") == 7
    assert "NO" not in text
    assert os.listdir(tmp_path) == []


def test_two_sides(tmp_path: Path) -> None:
    found, is_good = with_answers(tmp_path)
    assert is_good
    assert len(found) == 7


def no_links(*paths: Path) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def create_again(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT)


def no_sync(descriptor: object) -> None:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def copying_rename(source: Path, target: Path) -> None:
    """As an object store: each object is copied, and not yet removed."""
    shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)


def upload_at_close(descriptor: int, data: bytes) -> None:
    pass


@pytest.mark.parametrize(
    ("function", "replacement", "row", "reason"),
    [
        ("link", no_links, 1, "NO: Operation not permitted"),
        ("create", create_again, 0, "NO: a file was created twice"),
        ("sync_directory", no_sync, 2, "NO: Invalid argument"),
        ("rename", copying_rename, 3, "NO: the old name is still there"),
        ("overwrite", upload_at_close, 6, "NO: this process on host"),
    ],
)
def test_a_missing_property_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    replacement: Callable[..., Any],
    row: int,
    reason: str,
) -> None:
    monkeypatch.setattr(shared_folder, "LIMIT_S", 0.3)
    monkeypatch.setattr(storage, function, replacement)
    found, is_good = with_answers(tmp_path)
    assert not is_good
    assert found[row].startswith(reason), found


def test_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_START_S", 0.2)
    monkeypatch.setattr(shared_folder, "LIMIT_S", 0.2)
    found, is_good = results(tmp_path)
    assert not is_good
    assert all("does not see" in result for result in found[4:])


@pytest.mark.processes
def test_a_second_process_that_ends_at_once_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    monkeypatch.setattr(folder, "_START_S", 20.0)
    monkeypatch.setattr(shared_folder, "LIMIT_S", 0.2)
    began = time.monotonic()
    found, is_good = results(tmp_path, other_host=False)
    assert time.monotonic() - began < 10
    assert not is_good
    assert found[4:] == ["NO: the other process has ended without an answer; see its message above"] * 3


def refused_again(path: Path) -> int:
    if path.name == "ask-file" and path.exists():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def rename_before_files(source: Path, target: Path) -> None:
    """As a file system that shows the new name at once, and the files below it later."""
    os.rename(source, target)
    if target.name == "ask-folder":
        (target / "file").rename(target / "late")
        threading.Timer(0.3, (target / "late").rename, (target / "file",)).start()


def test_a_folder_whose_files_are_seen_later_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_folder, "LIMIT_S", 3.0)
    monkeypatch.setattr(storage, "rename", rename_before_files)
    problems: list[Exception] = []
    found, _ = with_answers(tmp_path, problems)
    assert not problems
    assert found[5].startswith("yes")


def test_another_error_of_the_other_side_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_folder, "LIMIT_S", 1.0)
    monkeypatch.setattr(storage, "create", refused_again)
    problems: list[Exception] = []
    found, is_good = with_answers(tmp_path, problems)
    assert not is_good
    assert "No space left on device" in found[4]
    assert [type(problem) for problem in problems] == [CheckpointError]


def test_files_of_others_are_read_with_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that never ends, and a probe that leads elsewhere."""
    monkeypatch.setattr(shared_folder, "LIMIT_S", 0.2)

    def link_answer(path: Path) -> None:
        os.mkdir(path)
        (path / "answer-start").symlink_to("/dev/zero")

    monkeypatch.setattr(storage, "make_directory", link_answer)
    found, _ = results(tmp_path)
    assert found[4].startswith("NO: answer-start: not a regular file")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "dtrain-doctor").symlink_to("elsewhere")
    with pytest.raises(ConfigError, match="must be a folder"):
        answer(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["folder"], "needs an existing folder, got none"),
        (["folder", "nix"], "needs an existing folder, got nix"),
        (["engines", "--answer"], "belong to dtrain doctor folder PATH"),
        (["engines", "more"], "takes one topic; got 'more' too"),
    ],
)
def test_usage(line: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *line]) == 2
    assert message in capsys.readouterr().err


def test_a_probe_of_another_command_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dtrain-doctor").mkdir()
    assert main(["doctor", "folder", str(tmp_path)]) == 2
    assert "remove it, unless another dtrain doctor runs there" in capsys.readouterr().err
    assert (tmp_path / "dtrain-doctor").is_dir()
