"""A save that fails at any file system call leaves the last good checkpoint unchanged (F10).

What one leaves that is killed at any call is among the states of ``test_power_cut``.
"""

import errno
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtrain.checkpoint import open_newest, storage, verify
from dtrain.errors import CheckpointError
from tests.faults.test_power_cut import two_good, with_leftovers
from tests.helpers.checkpoints import ALONE, assert_holds, make_tensors, save_good, save_threads
from tests.helpers.fault_counts import FaultCounts
from tests.helpers.power_cut import FUNCTIONS

Call = tuple[str, tuple[Any, ...]]


class Seam:
    """Wraps every function of ``storage``: runs ``act`` before each call."""

    def __init__(self, patch: pytest.MonkeyPatch, act: Callable[[Call], None]) -> None:
        self._files: dict[int, str] = {}
        for name in FUNCTIONS:
            patch.setattr(storage, name, self._wrap(name, getattr(storage, name), act))

    def _wrap(self, name: str, real: Callable[..., Any], act: Callable[[Call], None]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            act((name, args))
            result = real(*args)
            if name == "create":
                self._files[result] = args[0].name
            return result

        return call

    def is_at(self, call: Call, function: str, what: str) -> bool:
        """Whether a call is ``function`` on a file whose name starts with ``what``."""
        name, (target, *_) = call
        if name == "sync_directory" and (target / "step-00000300").exists():
            return (function, what) == COMMITTED
        return name == function and (target.name if isinstance(target, Path) else self._files[target]).startswith(what)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which a save commits, cleans up and deletes."""
    directory = tmp_path_factory.mktemp("template")
    with_leftovers(directory)
    return directory


def assert_sound(directory: Path, *, newest: int) -> None:
    """Visible checkpoints verify, the newest holds what was saved, and the next save leaves no leftovers."""
    assert verify(directory).ok
    reader = open_newest(directory, ALONE)
    assert reader.step == newest
    assert_holds(reader, make_tensors(newest))
    save_good(directory, 900)
    names = sorted(path.name for path in directory.iterdir())
    assert names == [f"step-{newest:08d}", "step-00000900"]


COMMITTED = ("sync_directory", "the commit")
LEASE = [(function, "lease-") for function in ("create", "write", "sync", "link", "remove_file")]
UNTIL_COMMIT = [
    ("rename", "step-00000250.tmp"), ("sync_directory", "checkpoints"), ("remove_file", "r0000"),
    ("remove_directory", "nested"), ("make_directory", "step-"),
    *((function, file) for function in ("create", "write", "sync") for file in ("r0000", "r0001", "manifest")),
    ("sync_directory", "step-"), ("rename", "step-00000300.tmp"), COMMITTED,
]  # fmt: skip
CLEAN_UP = UNTIL_COMMIT[:4]


@pytest.mark.parametrize(("lasting", "code"), [(False, errno.ENOSPC), (True, errno.EIO)])
def test_failure_reaches_every_rank_and_hurts_nothing(
    template: Path, tmp_path: Path, lasting: bool, code: int, faults: FaultCounts
) -> None:
    for function, what in LEASE + UNTIL_COMMIT:
        directory = shutil.copytree(template, tmp_path / f"{function}-{what}" / "checkpoints")
        fail_at(directory, function, what, code, lasting=lasting)
    faults.passed("F10", len(LEASE + UNTIL_COMMIT))


def fail_at(directory: Path, function: str, what: str, code: int, *, lasting: bool) -> None:
    """A save whose call of ``function`` on a file fails, and all later calls too if that is ``lasting``."""
    failed = threading.Event()

    def act(call: Call) -> None:
        hit = seam.is_at(call, function, what)
        if (lasting and failed.is_set() and call[0] != "close") or (hit and not failed.is_set()):
            failed.set()
            raise OSError(code, os.strerror(code))

    with pytest.MonkeyPatch.context() as patch:
        seam = Seam(patch, act)
        results = save_threads(directory, 300)
    assert all(isinstance(error, CheckpointError) for error in results), results
    assert len({str(error) for error in results}) == 1
    assert re.search(r"step-00000300 failed on rank [01]( \(and on 1 more\))?: ", str(results[0]))
    assert what != "r0001" or lasting or "failed on rank 1: " in str(results[0])
    assert (function, what) not in LEASE + CLEAN_UP or "failed on rank 0: " in str(results[0])
    assert f"{os.strerror(code)} (errno {code})" in str(results[0])
    # where even acquiring the commit's rename back fails, the checkpoint is there, and whole
    stays = lasting and (function, what) == COMMITTED
    if not lasting:
        left = sorted(path.name for path in directory.iterdir())
        visible = [name for name in left if ".tmp-" not in name]
        assert visible == ["step-00000100", "step-00000200"]
        assert left == visible or (function, what) in LEASE + CLEAN_UP
    assert verify(directory).ok
    assert open_newest(directory, ALONE).step == (300 if stays else 200)
    if not stays:
        assert save_threads(directory, 300) == [directory / "step-00000300"] * 2, "it can be saved again at once"
    assert_sound(directory, newest=300)


@pytest.mark.parametrize("function", ["rename", "sync_directory", "remove_file", "remove_directory"])
def test_failure_to_delete_old_ones_does_not_fail_the_save(tmp_path: Path, faults: FaultCounts, function: str) -> None:
    two_good(tmp_path)
    deleting = threading.Event()

    def act(call: Call) -> None:
        name, args = call
        if name == "rename" and args[0].name == "step-00000100":
            deleting.set()
        if deleting.is_set() and name == function:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        Seam(patch, act)
        assert save_threads(tmp_path, 300) == [tmp_path / "step-00000300"] * 2
    assert deleting.is_set()
    assert_sound(tmp_path, newest=300)
    faults.passed("F10", 1)


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("file", "link"):
        with pytest.raises(FileExistsError):
            storage.create(tmp_path / name)
    (tmp_path / "empty").mkdir()
    (tmp_path / "directory").mkdir()
    with pytest.raises(FileExistsError):
        storage.rename(tmp_path / "directory", tmp_path / "empty")
    assert not (tmp_path / "target").exists()


def test_directory_that_appears_during_a_save_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def act(call: Call) -> None:
        if call[0] == "create" and call[1][0].name == "manifest.json":
            (tmp_path / "step-00000300").mkdir()

    Seam(monkeypatch, act)
    for error in save_threads(tmp_path, 300):
        assert "failed on rank 0: File exists (errno 17)" in str(error)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000300"]
    assert list((tmp_path / "step-00000300").iterdir()) == []


def test_failure_other_than_the_file_system_reaches_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tensor: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr("dtrain.checkpoint.format.shard_file.host_blocks", fail)
    for error in save_threads(tmp_path, 100):
        assert "failed on rank 0 (and on 1 more): RuntimeError: CUDA error: an illegal memory access" in str(error)
    assert list(tmp_path.iterdir()) == []
