"""What lets an interrupted ``dtrain data tokenize`` resume: the folder ``unfinished`` inside of ``out``.

``job.json`` states the input and the options, and ``NNNNN.json`` each finished shard, written after its files. The
folder is removed once the manifest is there, so it may hold times.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from dtrain.data.shards.format import KINDS, MANIFEST, ShardEntry, shard_file
from dtrain.errors import ConfigError, directory_error
from dtrain.tools.data.inputs import Source
from dtrain.tools.data.worker import Finished
from dtrain.tools.data.writer import write_whole

_FOLDER, _JOB, _LOCK = "unfinished", "job.json", "lock"


def scratch_folder(out: Path) -> Path:
    return out / _FOLDER


def open_out(out: Path) -> IO[bytes]:
    """Creates the folder ``out``, or takes an empty or unfinished one, and returns the lock that keeps others away.

    Raises:
        ConfigError: it holds something else, or another command writes there.
    """
    scratch = scratch_folder(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        others = {path.name for path in out.iterdir()}
        if MANIFEST in others and not (scratch / _JOB).exists():
            raise ConfigError(f"out={out} holds finished token shards; choose another folder, or remove this one")
        if others and _FOLDER not in others:
            raise ConfigError(f"out={out} is not empty (it holds {min(others)}); choose another folder")
        scratch.mkdir(exist_ok=True)
        lock = (scratch / _LOCK).open("wb")
    except OSError as error:
        raise directory_error("out", error.filename or out, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        if isinstance(error, BlockingIOError):
            raise ConfigError(f"another dtrain data tokenize writes to out={out}; wait for it, or end it") from None
        raise ConfigError(f"out={out} cannot be locked: {error.strerror}; choose a folder on another disk") from None
    return lock


def describe_files(files: Mapping[str, Path]) -> dict[str, list[int]]:
    """Returns size and time of change of each file, by which another input is recognized."""
    found = {name: os.stat(path) for name, path in files.items()}
    return {name: [facts.st_size, facts.st_mtime_ns] for name, facts in found.items()}


def resume_or_start(out: Path, job: Mapping[str, Any]) -> None:
    """Records the job, or compares it with the one that was interrupted.

    Args:
        job: options by name, and ``files`` from ``describe_files``.

    Raises:
        ConfigError: the folder belongs to another job; the message states what differs.
    """
    path = scratch_folder(out) / _JOB
    if not path.exists():
        write_whole(path, json.dumps(job).encode())
        return
    try:
        old = json.loads(path.read_bytes())
        files = old.pop("files")
    except (ValueError, KeyError, AttributeError):
        raise ConfigError(f"{path} is damaged; remove out={out} and start again") from None
    new = {key: value for key, value in job.items() if key != "files"}
    difference = _difference(old, new, "not set") or _file_difference(files, job["files"])
    if difference:
        raise ConfigError(
            f"out={out} is unfinished and belongs to another job: {difference}. Use the same input and options to "
            "finish it, or choose another folder"
        )


def _difference(old: Mapping[str, Any], new: Mapping[str, Any], missing: str) -> str | None:
    for key in [*new, *(key for key in old if key not in new)]:
        if old.get(key, missing) != new.get(key, missing):
            return f"{key} was {old.get(key, missing)}, and is {new.get(key, missing)}"
    return None


def _file_difference(old: Mapping[str, list[int]], new: Mapping[str, list[int]]) -> str | None:
    for name in sorted({*old, *new}):
        if name not in new:
            return f"the input {name} is gone"
        if name not in old:
            return f"the input {name} is new"
        if old[name] != new[name]:
            return f"the input {name} has changed"
    return None


def record_shard(out: Path, number: int, finished: Finished) -> None:
    write_whole(scratch_folder(out) / f"{number:05d}.json", json.dumps(asdict(finished)).encode())


def finished_shards(out: Path, units: Sequence[Sequence[Source]], itemsize: int) -> dict[int, Finished]:
    """Returns the shards that are recorded and whose files have their sizes; removes what else is unfinished."""
    found = {}
    scratch = scratch_folder(out)
    for number in range(len(units)):
        path = scratch / f"{number:05d}.json"
        if path.exists():
            raw = json.loads(path.read_bytes())
            entry = ShardEntry(**raw["entry"])
            sizes = {"bin": entry.tokens * itemsize, "ends": 8 * entry.documents}
            files = {kind: shard_file(out, number, kind) for kind in KINDS}
            if all(file.is_file() for file in files.values()) and all(
                files[kind].stat().st_size == size for kind, size in sizes.items()
            ):
                found[number] = Finished(entry, raw["num_empty"])
    for path in scratch.iterdir():
        if path.name not in (_JOB, _LOCK) and path.suffix != ".json":
            path.unlink()
    return found


def end_job(out: Path) -> None:
    """Records that the job is finished: without its first file the other records are no job."""
    (scratch_folder(out) / _JOB).unlink()


def remove(out: Path) -> None:
    """Removes the records of a finished job; the lock is closed, because NFS removes no folder of an open file."""
    shutil.rmtree(scratch_folder(out), ignore_errors=True)
