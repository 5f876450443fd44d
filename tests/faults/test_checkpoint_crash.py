"""A save that fails or is killed at any file system call leaves the last good checkpoint unchanged (F2, F10)."""

import errno
import functools
import os
import re
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtrain.checkpoint import open_newest, storage, verify
from dtrain.errors import CheckpointError
from tests.helpers.checkpoints import ALONE, assert_holds, make_tensors, save_good, save_threads
from tests.helpers.fault_counts import FEW_AND_MANY, FaultCounts
from tests.helpers.power_cut import FUNCTIONS

Call = tuple[str, tuple[Any, ...]]
Saving = Callable[[Path, int], list[Any]]


class Seam:
    """Wraps every function of ``storage``: records the calls and runs ``act`` before each of them."""

    def __init__(self, patch: pytest.MonkeyPatch, act: Callable[[int, Call], None] = lambda index, call: None) -> None:
        self.calls: list[Call] = []
        self._files: dict[int, str] = {}
        self._lock = threading.Lock()
        for name in FUNCTIONS:
            patch.setattr(storage, name, self._wrap(name, getattr(storage, name), act))

    def _wrap(self, name: str, real: Callable[..., Any], act: Callable[[int, Call], None]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self._lock:
                index = len(self.calls)
                self.calls.append((name, args))
            act(index, (name, args))
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


@functools.cache
def _template() -> tempfile.TemporaryDirectory[str]:
    """Two good checkpoints and leftovers of a crash, in memory and made once."""
    folder = tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    directory = Path(folder.name)
    for step in (100, 200):
        save_good(directory, step)
    leftover = directory / "step-00000250.tmp-ab12cd34"
    (leftover / "nested").mkdir(parents=True)
    (leftover / "r0000.safetensors").write_bytes(b"half")
    (leftover / "nested" / "file").write_bytes(b"")
    return folder


def prepare(directory: Path) -> None:
    """Makes a directory in which a save commits, cleans up and deletes."""
    shutil.copytree(_template().name, directory, dirs_exist_ok=True)


def assert_sound(directory: Path, *, newest: int) -> None:
    """Visible checkpoints verify, the newest holds what was saved, and the next save leaves no leftovers."""
    assert verify(directory).ok
    reader = open_newest(directory, ALONE)
    assert reader.step == newest
    assert_holds(reader, make_tensors(newest))
    save_good(directory, 900)
    names = sorted(path.name for path in directory.iterdir())
    assert names == [f"step-{newest:08d}", "step-00000900"]


def save_killed_at(directory: Path, index: int) -> None:
    """A save in a fork that is killed before its call ``index``, or in the middle of it if it is a write."""

    def act(i: int, call: Call) -> None:
        if i == index:
            if call[0] == "write":
                descriptor, data = call[1]
                os.write(descriptor, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    if (pid := os.fork()) == 0:
        try:
            Seam(pytest.MonkeyPatch(), act)
            save_good(directory, 300, 1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@FEW_AND_MANY
def test_killed_at_every_point(tmp_path: Path, many: bool, faults: FaultCounts) -> None:
    """Those of the first save of a run, and of all that runs do, are states of ``test_power_cut``."""
    prepare(tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        seam = Seam(patch)
        save_good(tmp_path / "whole", 300, 1)
    last = len(seam.calls) - 1
    (commit,) = (i for i, (name, args) in enumerate(seam.calls) if name == "rename" and args[1].name == "step-00000300")
    chosen = range(last + 1) if many else [*range(0, commit, 8), commit, commit + 1, last]
    for index in chosen:
        directory = tmp_path / f"at{index}"
        prepare(directory)
        save_killed_at(directory, index)
        assert_sound(directory, newest=300 if index > commit else 200)
    assert last > 24
    faults.passed("F2", len(chosen))


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
    tmp_path: Path, lasting: bool, code: int, faults: FaultCounts
) -> None:
    for function, what in LEASE + UNTIL_COMMIT:
        fail_at(tmp_path / f"{function}-{what}" / "checkpoints", function, what, code, lasting=lasting)
    faults.passed("F10", len(LEASE + UNTIL_COMMIT))


def fail_at(
    directory: Path, function: str, what: str, code: int, *, lasting: bool = False, save: Saving = save_threads
) -> None:
    """A save whose call of ``function`` on a file fails, and all later calls too if that is ``lasting``."""
    prepare(directory)
    failed = threading.Event()

    def act(index: int, call: Call) -> None:
        hit = seam.is_at(call, function, what)
        if (lasting and failed.is_set() and call[0] != "close") or (hit and not failed.is_set()):
            failed.set()
            raise OSError(code, os.strerror(code))

    with pytest.MonkeyPatch.context() as patch:
        seam = Seam(patch, act)
        results = save(directory, 300)
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
        assert save(directory, 300) == [directory / "step-00000300"] * 2, "it can be saved again at once"
    assert_sound(directory, newest=300)


@pytest.mark.parametrize("function", ["rename", "sync_directory", "remove_file", "remove_directory"])
def test_failure_to_delete_old_ones_does_not_fail_the_save(tmp_path: Path, faults: FaultCounts, function: str) -> None:
    directory = tmp_path / "checkpoints"
    for step in (100, 200):
        save_good(directory, step)
    deleting = threading.Event()

    def act(index: int, call: Call) -> None:
        name, args = call
        if name == "rename" and Path(args[0]).name == "step-00000100":
            deleting.set()
        if deleting.is_set() and name == function:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        Seam(patch, act)
        assert save_threads(directory, 300) == [directory / "step-00000300"] * 2
    assert deleting.is_set()
    assert_sound(directory, newest=300)
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
    def act(index: int, call: Call) -> None:
        if call[0] == "create" and call[1][0].name == "manifest.json":
            (tmp_path / "step-00000300").mkdir()

    with monkeypatch.context() as patch:
        Seam(patch, act)
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
