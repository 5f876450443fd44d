"""Tests whether a folder has what a checkpoint's commit and the lease need, in one process and between two hosts.

The second process, on this host or another one, answers through the folder itself. Names, renames and contents that one
side has changed must be seen by the other one as ``dtrain.checkpoint.shared_folder`` looks for them.
"""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from dtrain.checkpoint import storage
from dtrain.checkpoint.directory import remove_tree
from dtrain.checkpoint.format.checked_file import DamageError, open_regular, read_bytes
from dtrain.checkpoint.shared_folder import until_seen
from dtrain.distributed.consensus import describe
from dtrain.distributed.logging import logger
from dtrain.errors import CheckpointError, ConfigError
from dtrain.tools.tables import Table

PROBE = "dtrain-doctor"
_START_S = 600.0  # for the command on the other host
_CONTENT = bytes(range(256)) * 4096  # 1 MiB
_ROUNDS = {
    "file": "a new file, and cannot create it again",
    "folder": "a renamed folder, complete",
    "content": "a file overwritten and synced",
}
Check = Callable[[Path], None]


def check_folder(path: Path, *, other_host: bool) -> tuple[Table, bool]:
    """Returns a row for each property, and whether the folder has all of them."""
    probe = path / PROBE
    try:
        storage.make_directory(probe)
    except FileExistsError:
        raise ConfigError(f"{probe} exists: remove it, unless another dtrain doctor runs there") from None
    except OSError as error:
        raise ConfigError(f"{probe} cannot be created: {describe(error)}") from error
    try:
        rows = [(name, _result(partial(check, probe)), use) for name, use, check in _CHECKS]
        rows += _between_processes(path, other_host=other_host)
    finally:
        try:
            remove_tree(probe)
        except OSError as error:
            logger.warning("%s could not be removed: %s", probe, describe(error))
    where = "between two hosts" if other_host else "on this host"
    table = Table(f"{path}, {where}", ("property", "result", "needed for"), rows)
    return table, all(result.startswith("yes") for _, result, _ in rows)


def _result(check: Callable[[], None]) -> str:
    try:
        check()
    except (OSError, CheckpointError) as error:
        return f"NO: {describe(error)}"
    return "yes"


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise CheckpointError(reason)


# -- in one process ----------------------------------------------------------------------------------------------------


def _create(path: Path, data: bytes = b"") -> None:
    descriptor = storage.create(path)
    try:
        storage.write(descriptor, data)
        storage.sync(descriptor)
    finally:
        storage.close(descriptor)


def _refuses(work: Callable[[], None], *errors: int) -> bool:
    try:
        work()
    except OSError as error:
        return error.errno in errors
    return False


def _check_create(probe: Path) -> None:
    _create(probe / "created")
    _require(_refuses(lambda: _create(probe / "created"), errno.EEXIST), "a file was created twice")


def _check_link(probe: Path) -> None:
    _create(probe / "linked")
    storage.link(probe / "linked", probe / "link")
    again = partial(storage.link, probe / "linked", probe / "link")
    _require(_refuses(again, errno.EEXIST), "a name was linked twice")


def _check_sync(probe: Path) -> None:
    _create(probe / "synced", _CONTENT)
    storage.sync_directory(probe)


def _check_rename(probe: Path) -> None:
    for name in ("old", "full"):
        storage.make_directory(probe / name)
        _create(probe / name / "file", _CONTENT)
    storage.rename(probe / "old", probe / "new")
    _require(not os.path.lexists(probe / "old"), "the old name is still there")
    _require((probe / "new" / "file").read_bytes() == _CONTENT, "the folder's file is not what was written")
    onto_full = partial(os.rename, probe / "new", probe / "full")
    _require(_refuses(onto_full, errno.ENOTEMPTY, errno.EEXIST), "a folder replaced another one that has files")


_CHECKS: tuple[tuple[str, str, Check], ...] = (
    ("a file is created only once", "files of ranks", _check_create),
    ("a hard link is made only once", "the lease", _check_link),
    ("files and folders are synced without an error", "the commit", _check_sync),
    ("a folder is renamed with its files, and never onto others", "the commit", _check_rename),
)


# -- between two processes ---------------------------------------------------------------------------------------------


def _between_processes(path: Path, *, other_host: bool) -> list[tuple[str, str, str]]:
    with _answering(path, other_host=other_host) as has_ended:
        rows = []
        wait_for = partial(_wait_for_answer, path / PROBE, has_ended=has_ended)
        result = _result(partial(wait_for, "start", seconds=_START_S))
        for name, meaning in _ROUNDS.items():
            if result.startswith("yes"):
                began = time.monotonic()
                result = _result(partial(_ask, path / PROBE, name, wait_for))
                result += f", after {time.monotonic() - began:.2f} s there and back" if result == "yes" else ""
            rows.append((f"the other process sees {meaning}", result, "ranks, the lease"))
    return rows


@contextmanager
def _answering(path: Path, *, other_host: bool) -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether the other process has ended; False if it is on another host."""
    if other_host:
        print(f"now, on the other host: dtrain doctor folder {path} --answer", file=sys.stderr, flush=True)
        yield lambda: False
        return
    command = [sys.executable, "-P", "-m", "dtrain", "doctor", "folder", str(path), "--answer"]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        yield lambda: process.poll() is not None
    finally:
        process.kill()
        process.wait()


def _ask(probe: Path, name: str, wait_for: Callable[[str], None]) -> None:
    if name == "file":
        _create(probe / "ask-file")
        _create(probe / "ask-content", b"before")
    elif name == "folder":
        storage.make_directory(probe / "ask.tmp")
        _create(probe / "ask.tmp" / "file", _CONTENT)
        storage.sync_directory(probe / "ask.tmp")
        storage.rename(probe / "ask.tmp", probe / "ask-folder")
        storage.sync_directory(probe)
    else:
        descriptor = os.open(probe / "ask-content", os.O_WRONLY)
        try:  # as the lease's heartbeats: the file stays open
            storage.overwrite(descriptor, b"after!")
            storage.sync(descriptor)
            wait_for(name)
        finally:
            storage.close(descriptor)
        return
    wait_for(name)


def _wait_for_answer(probe: Path, name: str, *, has_ended: Callable[[], bool], seconds: float = 0.0) -> None:
    path = probe / f"answer-{name}"
    deadline = time.monotonic() + seconds

    def before_pause() -> None:
        if has_ended() and not os.path.lexists(path):
            raise CheckpointError("the other process has ended without an answer; see its message above")

    while not os.path.lexists(path) and time.monotonic() < deadline:
        before_pause()
        time.sleep(0.1)
    read = partial(_read, path, 1000)
    text = until_seen(read, path, "this process", "the other one should have created", before_pause)
    _require(text == b"ok", ascii(text.decode(errors="replace")))


def _read(path: Path, limit: int) -> bytes:
    """Reads at most ``limit`` bytes of a regular file, because others may be able to write in the folder."""
    with open_regular(path) as (descriptor, size):
        return read_bytes(descriptor, path.name, 0, min(size, limit))


def answer(path: Path) -> None:
    """Answers one ``check_folder``; raises ``CheckpointError`` if it does not see a change, or not as it should."""
    probe = path / PROBE
    look = partial(os.lstat, probe)
    status = until_seen(look, probe, "this process", "dtrain doctor folder PATH --other-host creates")
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{probe} must be a folder, got {stat.filemode(status.st_mode)}; remove it")
    try:
        _answer(probe, "start", "ok")
        # not the user of this process, which a server may map to another one
        if os.lstat(probe / "answer-start").st_uid != status.st_uid:
            raise ConfigError(f"{probe} belongs to another user, {status.st_uid}; run both commands as the same user")
        for name in _ROUNDS:
            asked = probe / f"ask-{name}"
            try:
                problem = until_seen(partial(_problem, name, asked), asked, "this process", "the other one has changed")
            except (OSError, DamageError) as error:
                problem = describe(error)
            _answer(probe, name, problem or "ok")
            _require(not problem, f"{asked}: {problem}")
    except OSError as error:
        raise CheckpointError(f"{probe} cannot be used: {describe(error)}") from error


def _problem(name: str, asked: Path) -> str:
    """Returns what is wrong, or nothing; raises an error of the kind that ``until_seen`` awaits if it is not there."""
    if name == "file":
        os.lstat(asked)
        with suppress(FileExistsError):
            _create(asked)
            return "the other process could create the file once more"
    elif name == "folder":
        if _read(asked / "file", len(_CONTENT)) != _CONTENT:
            return "the renamed folder lacks a part of its file"
    elif _read(asked, 100) != b"after!":
        raise FileNotFoundError(errno.ENOENT, "it has its old content", str(asked))
    return ""


def _answer(probe: Path, name: str, text: str) -> None:
    _create(probe / f"{name}.tmp", text.encode())
    storage.rename(probe / f"{name}.tmp", probe / f"answer-{name}")
