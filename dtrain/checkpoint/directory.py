"""Names in a directory of checkpoints, and what may be renamed or removed there.

step-00000200/              committed: it has this name only once it is complete on disk
step-00000300.tmp-1f0c9a2b/ a save under way, or what a crash left of one; never read
bad-step-00000100-sha256/   did not verify; renamed, never deleted
lease-00000001.json         who may write here (dtrain.checkpoint.lease.lease)
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from dtrain.checkpoint import storage
from dtrain.errors import CheckpointError

STEP_NAME = re.compile(r"step-([0-9]{8,})")
_TEMPORARY = re.compile(r"step-[0-9]{8,}\.tmp-[0-9a-f]+")
_QUARANTINED = re.compile(r"bad-step-[0-9]{8,}-.+")


class NoCheckpointError(CheckpointError):
    """There is no checkpoint at all, good or bad: a run that resumes by itself may start from the beginning."""


def step_name(step: int) -> str:
    """The directory's name for a step."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step of a committed checkpoint, by its directory's name."""
    return int(path.name.removeprefix("step-"))


def temporary_path(directory: Path, step: int) -> Path:
    """A new name for a directory that is not, or no longer, a checkpoint."""
    return directory / f"{step_name(step)}.tmp-{secrets.token_hex(4)}"


def committed(directory: Path) -> list[Path]:
    """The ``step-...`` entries of a directory of checkpoints, oldest step first; [] where it does not exist.

    Raises:
        OSError: it cannot be listed.
    """
    return sorted(_matching(directory, STEP_NAME), key=step_of)


def quarantined(directory: Path) -> list[Path]:
    """The ``bad-step-...`` entries, by name; raises as :func:`committed` does."""
    return sorted(_matching(directory, _QUARANTINED))


def _matching(directory: Path, pattern: re.Pattern[str]) -> list[Path]:
    try:
        return [directory / name for name in os.listdir(directory) if pattern.fullmatch(name)]
    except FileNotFoundError:
        return []


def is_single(path: Path) -> bool:
    """Whether a path means one checkpoint rather than a directory of them.

    Raises:
        CheckpointError: it is a save that was never finished.
    """
    name = path.resolve().name
    if _TEMPORARY.fullmatch(name):
        raise CheckpointError(f"{path} is a save that never finished and is never read; give a step-... directory")
    known = STEP_NAME.fullmatch(name) or _QUARANTINED.fullmatch(name)
    return bool(known) or os.path.lexists(path / "manifest.json")


def of_run(path: Path) -> Path:
    """``path/checkpoints`` where ``path`` is a run directory that has one, else ``path``."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def make_directories(path: Path) -> None:
    """Makes a directory and its missing parents, each one's name on disk before it is used.

    Raises:
        OSError: what the file system says.
    """
    if path.is_dir():  # its name may not be on disk yet, where who made it was killed before its fsync
        with suppress(OSError):  # such as of a parent that must not be read: not by who made it
            storage.sync_directory(path.parent)
        return
    make_directories(path.parent)
    try:
        storage.make_directory(path)
    except FileExistsError:  # made by another job just now, or no directory
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    storage.sync_directory(path.parent)


def remove_tree(path: Path) -> None:
    """Removes a directory and what is in it, or a file; a link is removed, never followed.

    Raises:
        OSError: what the file system says.
    """
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        storage.remove_file(path)
        return
    for name in sorted(os.listdir(path)):
        remove_tree(path / name)
    storage.remove_directory(path)


def sweep(directory: Path) -> None:
    """Removes what saves that never finished have left; for the holder of the directory's lease alone.

    Each loses its name first: where a job that has lost the lease is still at work in one, it cannot commit it from
    then on, and opens no more files there. That is on disk before any file goes, as is the new name of a checkpoint
    whose removal was cut short: no power cut gives it back its old one.

    Raises:
        OSError: what the file system says.
    """
    graves = []
    for path in sorted(_matching(directory, _TEMPORARY)):
        grave = path.with_suffix(f".tmp-{secrets.token_hex(4)}")
        with suppress(FileNotFoundError):  # its own save has just removed it
            storage.rename(path, grave)
            graves.append(grave)
    if graves:
        storage.sync_directory(directory)
    for grave in graves:
        remove_tree(grave)


def retire(path: Path) -> None:
    """Removes a committed checkpoint: it loses its name first, so that no crash leaves half of one under it.

    Raises:
        OSError: what the file system says.
    """
    grave = temporary_path(path.parent, step_of(path))
    storage.rename(path, grave)
    storage.sync_directory(path.parent)
    remove_tree(grave)


def quarantine(path: Path, why: str) -> Path:
    """Renames a checkpoint that does not verify to ``bad-step-...-WHY`` and returns its new path.

    Raises:
        OSError: what the file system says.
    """
    target, count = path.parent / f"bad-{path.name}-{why}", 1
    while os.path.lexists(target):
        count += 1
        target = path.parent / f"bad-{path.name}-{why}-{count}"
    storage.rename(path, target)
    storage.sync_directory(path.parent)
    return target
