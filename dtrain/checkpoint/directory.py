"""Names in a directory of checkpoints, and the renames and removals that are allowed there.

step-00000200/              committed: it has this name only once it is complete on disk
step-00000300.tmp-1f0c9a2b/ a save in progress, or leftovers of one; never read
bad-step-00000100-hash/     quarantined: it did not verify; renamed, never deleted
lease-00000001.json         which process may write here (dtrain.checkpoint.lease.lease)

A directory that must go is first renamed to a ``.tmp-...`` name, its tombstone, and the rename is synced: no crash can
leave half of a checkpoint under a committed name. Functions that touch the disk raise ``OSError`` if that fails.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dtrain.checkpoint import storage
from dtrain.checkpoint.shared_folder import until_seen
from dtrain.errors import CheckpointError

STEP_NAME = re.compile(r"step-([0-9]{8,})")
_TEMPORARY = re.compile(r"step-[0-9]{8,}\.tmp-[0-9a-f]+")
_QUARANTINED = re.compile(r"bad-step-[0-9]{8,}-.+")


class NoCheckpointError(CheckpointError):
    """No checkpoint exists, neither good nor damaged, so a run that resumes automatically may start from scratch."""


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def temporary_path(directory: Path, step: int) -> Path:
    """Returns a new path for a save in progress or for a tombstone."""
    # random, so that a job that lost the lease cannot write into the save of the job that took it over
    return directory / f"{step_name(step)}.tmp-{secrets.token_hex(4)}"


def committed_checkpoints(directory: Path) -> list[Path]:
    """Lists the ``step-...`` entries of a directory, oldest first; [] if the directory does not exist."""
    return sorted(_matching(directory, STEP_NAME), key=step_of)


def quarantined_checkpoints(directory: Path) -> list[Path]:
    return sorted(_matching(directory, _QUARANTINED))


def _matching(directory: Path, pattern: re.Pattern[str]) -> list[Path]:
    try:
        return [directory / name for name in os.listdir(directory) if pattern.fullmatch(name)]
    except FileNotFoundError:
        return []


def is_single_checkpoint(path: Path) -> bool:
    """Whether a path is one checkpoint rather than a directory of them.

    Raises:
        CheckpointError: the path is an unfinished save.
    """
    name = path.resolve().name
    if _TEMPORARY.fullmatch(name):
        raise CheckpointError(f"{path} is a save that never finished and is never read; give a step-... directory")
    known = STEP_NAME.fullmatch(name) or _QUARANTINED.fullmatch(name)
    return bool(known) or os.path.lexists(path / "manifest.json")


def checkpoints_dir(path: Path) -> Path:
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def make_directories(path: Path, while_waiting: Callable[[], None] = lambda: None) -> None:
    """Creates a directory and its missing parents, and syncs each name before it is used.

    ``while_waiting`` is called between two attempts if another host has changed the names.
    """
    if path.is_dir():  # its name may not be on disk yet: its creator may have been killed before the fsync
        with suppress(OSError):  # a parent that may not be read was not created by us
            storage.sync_directory(path.parent)
        return

    def make() -> None:
        make_directories(path.parent, while_waiting)
        with suppress(FileExistsError):  # created by another job just now, or not a directory
            storage.make_directory(path)
        os.lstat(path)  # not found: [Note: cached names], or that job has removed it since

    until_seen(make, path, "this process", "exists", while_waiting)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    storage.sync_directory(path.parent)


def remove_tree(path: Path) -> None:
    """Removes a file or a directory with its content; removes links without following them."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        storage.remove_file(path)
        return
    for name in sorted(os.listdir(path)):
        remove_tree(path / name)
    storage.remove_directory(path)


def clean_up(directory: Path) -> None:
    """Removes leftovers of unfinished saves and removals; only the holder of the directory's lease may call it.

    Each leftover is renamed first: a job that lost the lease but still writes there can then neither commit it nor open
    more files in it. The renames are synced before any file is removed, so that no power cut can restore the committed
    name of a checkpoint whose removal was interrupted."""
    tombstones = []
    for path in sorted(_matching(directory, _TEMPORARY)):
        tombstone = path.with_suffix(f".tmp-{secrets.token_hex(4)}")
        with suppress(FileNotFoundError):  # the save that created it has just removed it
            storage.rename(path, tombstone)
            tombstones.append(tombstone)
    if tombstones:
        storage.sync_directory(directory)
    for tombstone in tombstones:
        remove_tree(tombstone)


def delete_checkpoint(path: Path) -> None:
    """Deletes a committed checkpoint: renames it to a tombstone, syncs the rename, then removes the files."""
    tombstone = temporary_path(path.parent, step_of(path))
    storage.rename(path, tombstone)
    storage.sync_directory(path.parent)
    remove_tree(tombstone)


def quarantine(path: Path, tag: str) -> Path:
    """Renames a checkpoint that does not verify to ``bad-step-...-TAG`` and returns its new path."""
    target, count = path.parent / f"bad-{path.name}-{tag}", 1
    while os.path.lexists(target):
        count += 1
        target = path.parent / f"bad-{path.name}-{tag}-{count}"
    storage.rename(path, target)
    storage.sync_directory(path.parent)
    return target
