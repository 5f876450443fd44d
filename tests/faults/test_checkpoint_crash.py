"""A save that fails or is killed at any file system call leaves the last good checkpoint unchanged (F2, F10)."""

import errno
import functools
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtrain.checkpoint import Snapshot, list_checkpoints, open_newest, save, storage, verify
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.setup import connect
from dtrain.errors import CheckpointError
from tests.helpers.checkpoints import (
    ALONE,
    assert_holds,
    make_tensors,
    save_good,
    save_threads,
    shards_of,
)
from tests.helpers.ranks import RankFailure, run_ranks

SEAM = (
    "make_directory",
    "create",
    "write",
    "overwrite",
    "sync",
    "close",
    "sync_directory",
    "rename",
    "link",
    "remove_file",
    "remove_directory",
)
Call = tuple[str, tuple[Any, ...]]


class Seam:
    """Wraps every function of ``storage``: records the calls and runs ``act`` before each of them."""

    def __init__(self, patch: pytest.MonkeyPatch, act: Callable[[int, Call], None] = lambda index, call: None) -> None:
        self.calls: list[Call] = []
        self._files: dict[int, str] = {}
        self._lock = threading.Lock()
        for name in SEAM:
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


def names_of(calls: list[Call]) -> list[str]:
    return [f"{name} {' '.join(Path(arg).name for arg in args if isinstance(arg, Path))}" for name, args in calls]


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    """Recorded calls of one save by one rank."""
    directory = tmp_path_factory.mktemp("points")
    prepare(directory)
    with pytest.MonkeyPatch.context() as patch:
        seam = Seam(patch)
        save_good(directory, 300, 1)
    return seam.calls


def test_order_of_the_protocol(points: list[Call]) -> None:
    """Order: data, directory entries, the commit's rename, its fsync, and only then the deletion of old checkpoints."""
    names = names_of(points)
    temporary = next(name.split()[1] for name in names if name.startswith("make_directory"))
    begin, manifest = names.index(f"make_directory {temporary}"), names.index("create manifest.json")
    acquiring, order = names[:begin], names[begin : manifest + 7]
    assert acquiring.pop(0).startswith("sync_directory ")  # makes the directory's own name durable, whoever created it
    lease = acquiring[0].split()[1]
    assert re.fullmatch(r"lease-00000001\.tmp-[0-9a-f]{8}", lease)
    assert acquiring[:5] == [
        f"create {lease}",
        "write ",
        "sync ",
        f"link {lease} lease-00000001.json",
        f"remove_file {lease}",
    ]
    assert re.fullmatch(r"rename step-00000250\.tmp-ab12cd34 step-00000250\.tmp-[0-9a-f]{8}", acquiring[5])
    assert acquiring[6] == "sync_directory points0"
    assert {name.split()[0] for name in acquiring[7:]} == {"remove_file", "remove_directory"}  # clean up
    assert order == [
        f"make_directory {temporary}",
        "create r0000.safetensors",
        *["write "] * (manifest - begin - 4),
        "sync ",
        "close ",
        "create manifest.json",
        "write ",
        "sync ",
        "close ",
        f"sync_directory {temporary}",
        f"rename {temporary} step-00000300",
        "sync_directory points0",
    ]
    renamed, synced, *removals, release, closed = names[begin + len(order) :]
    assert renamed.startswith(
        "rename step-00000100 step-00000100.tmp-"
    )  # loses its committed name before any file is removed
    assert synced == "sync_directory points0"
    assert all(name.startswith("remove_") for name in removals)
    assert [release, closed] == ["remove_file lease-00000001.json", "close "]
    assert len(names) >= 24


def in_child(work: Callable[[], None]) -> int:
    """Runs ``work`` in a forked child; returns its exit code, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            print(f"child: {error!r}", file=sys.__stderr__)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_at_every_point(tmp_path: Path, points: list[Call]) -> None:
    names = names_of(points)
    commit = next(index for index, name in enumerate(names) if name.endswith(" step-00000300"))
    for index, name in enumerate(names):
        directory = tmp_path / f"at{index}"
        prepare(directory)

        def work(directory: Path = directory, index: int = index) -> None:
            Seam(pytest.MonkeyPatch(), lambda i, call: die() if i == index else None)
            save_good(directory, 300, 1)

        assert in_child(work) == -signal.SIGKILL, name
        assert_sound(directory, newest=300 if index > commit else 200)


def test_killed_in_the_middle_of_every_write(tmp_path: Path, points: list[Call]) -> None:
    writes = [index for index, (name, _) in enumerate(points) if name == "write"]
    assert len(writes) > 5
    for index in writes:
        directory = tmp_path / f"at{index}"
        prepare(directory)

        def act(i: int, call: Call, index: int = index) -> None:
            if i == index:
                descriptor, data = call[1]
                os.write(descriptor, data[: len(data) // 2])
                die()

        def work(directory: Path = directory, act: Callable[[int, Call], None] = act) -> None:
            Seam(pytest.MonkeyPatch(), act)
            save_good(directory, 300, 1)

        assert in_child(work) == -signal.SIGKILL
        assert_sound(directory, newest=200)


def test_killed_in_the_first_save_of_a_run(tmp_path: Path) -> None:
    for index in range(60):
        directory = tmp_path / f"at{index}" / "run" / "checkpoints"

        def work(directory: Path = directory, index: int = index) -> None:
            Seam(pytest.MonkeyPatch(), lambda i, call: die() if i == index else None)
            save_good(directory, 300, 1)

        if in_child(work) == 0:
            break
        seen = list_checkpoints(directory) if directory.exists() else []
        assert [item.ok for item in seen] in ([], [True])
        save_good(directory, 400)
        assert not [path for path in directory.iterdir() if ".tmp-" in path.name]
    assert 20 < index < 60


COMMITTED = ("sync_directory", "the commit")
FAULTS = [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT]
LEASE = [
    ("create", "lease-"),
    ("write", "lease-"),
    ("sync", "lease-"),
    ("link", "lease-"),
    ("remove_file", "lease-"),
]
UNTIL_COMMIT = [
    ("rename", "step-00000250.tmp"),
    ("sync_directory", "checkpoints"),
    ("remove_file", "r0000"),
    ("remove_directory", "nested"),
    ("make_directory", "step-"),
    ("create", "r0000"),
    ("create", "r0001"),
    ("create", "manifest"),
    ("write", "r0000"),
    ("write", "r0001"),
    ("write", "manifest"),
    ("sync", "r0000"),
    ("sync", "r0001"),
    ("sync", "manifest"),
    ("sync_directory", "step-"),
    ("rename", "step-00000300.tmp"),
    COMMITTED,
]
CLEAN_UP = UNTIL_COMMIT[:4]


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda code: errno.errorcode[code])
@pytest.mark.parametrize(("function", "what"), LEASE + UNTIL_COMMIT)
def test_failure_reaches_every_rank_and_hurts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, what: str, fault: int, lasting: bool
) -> None:
    directory = tmp_path / "checkpoints"
    prepare(directory)
    failed = threading.Event()

    def act(index: int, call: Call) -> None:
        hit = seam.is_at(call, function, what)
        if (lasting and failed.is_set() and call[0] != "close") or (hit and not failed.is_set()):
            failed.set()
            raise OSError(fault, os.strerror(fault))

    with monkeypatch.context() as patch:
        seam = Seam(patch, act)
        results = save_threads(directory, 300)
    assert all(isinstance(error, CheckpointError) for error in results), results
    assert len({str(error) for error in results}) == 1
    assert re.search(r"step-00000300 failed on rank [01]( \(and on 1 more\))?: ", str(results[0]))
    assert what != "r0001" or lasting or "failed on rank 1: " in str(results[0])
    assert (function, what) not in LEASE + CLEAN_UP or "failed on rank 0: " in str(results[0])
    assert f"{os.strerror(fault)} (errno {fault})" in str(results[0])
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
        save_good(directory, 300)  # the same step can be saved again at once
    assert_sound(directory, newest=300)


@pytest.mark.parametrize("function", ["rename", "sync_directory", "remove_file", "remove_directory"])
def test_failure_to_delete_old_checkpoints_does_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
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

    with monkeypatch.context() as patch:
        Seam(patch, act)
        assert save_threads(directory, 300) == [directory / "step-00000300"] * 2
    assert deleting.is_set()
    assert verify(directory).ok
    assert_sound(directory, newest=300)


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


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr("os.write", lambda descriptor, data: real(descriptor, memoryview(data)[:7]))
        save_good(tmp_path, 100)
    assert_holds(open_newest(tmp_path, ALONE), make_tensors(100))


def test_failure_other_than_the_file_system_reaches_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tensor: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr("dtrain.checkpoint.format.shard_file.host_blocks", fail)
    for error in save_threads(tmp_path, 100):
        assert "failed on rank 0 (and on 1 more): RuntimeError: CUDA error: an illegal memory access" in str(error)
    assert list(tmp_path.iterdir()) == []


def _dies_in_its_write(rank: int, world: int, directory: Path) -> None:
    comm: Communicator = connect(ALONE.device)
    if rank == 1:
        Seam(pytest.MonkeyPatch(), lambda index, call: die() if call[0] == "sync" else None)
    save(directory, Snapshot(300, shards_of(make_tensors(300), rank, world), {}), comm)


def test_one_real_rank_killed_in_a_save(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    prepare(directory)
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, _dies_in_its_write, directory)
    assert "--- rank 1:\nthe process died without a result" in str(failure.value)
    assert [path.name for path in directory.iterdir() if path.name.startswith("step-00000300.tmp-")]
    assert_sound(directory, newest=200)
