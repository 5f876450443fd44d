"""The commit of a checkpoint: every rank writes and syncs its file, then rank 0 checks and renames the directory.

[Note: commit order] Each step is durable before the next one relies on it, so no crash or power cut can show an
incomplete checkpoint under its name: data files, manifest, entries of the temporary directory, lease check, rename,
entry of the parent directory, and only then the deletion of older checkpoints. The lease check directly precedes the
rename because another process may have taken the lease over at any time before.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from dtrain.checkpoint import storage
from dtrain.checkpoint.directory import (
    clean_up,
    committed_checkpoints,
    delete_checkpoint,
    quarantine,
    remove_tree,
    step_name,
    temporary_path,
)
from dtrain.checkpoint.format import manifest as manifests
from dtrain.checkpoint.format.checked_file import DamageError
from dtrain.checkpoint.format.fingerprint import MASK
from dtrain.checkpoint.format.integrity import verify_checkpoint
from dtrain.checkpoint.format.manifest import FileEntry, FileInterval, Manifest, TensorEntry, check_tiling
from dtrain.checkpoint.format.safetensors_file import DTYPES
from dtrain.checkpoint.format.shard_file import WrittenShard, new_file, write_shard_file
from dtrain.checkpoint.format.training_state import TrainingState
from dtrain.checkpoint.lease.lease import hold
from dtrain.checkpoint.retention import Retention, find_expired
from dtrain.checkpoint.shared_folder import until_seen
from dtrain.checkpoint.snapshot import Snapshot, stored_state
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.consensus import describe, on_every_rank, on_rank_0, on_rank_0_for_long
from dtrain.distributed.logging import logger
from dtrain.errors import CheckpointError, Corruption, CorruptionError
from dtrain.local_paths import local_path


# flags shared by the thread that saves and the thread that trains
@dataclass
class SaveControl:
    failed: bool = False  # set by the saving thread: this rank's part has failed, so the save cannot succeed
    cancel_requested: bool = False  # set by the training thread: another rank's part has failed, so stop writing

    def raise_if_cancelled(self) -> None:
        if self.cancel_requested:
            raise _SaveCancelledError


class _SaveCancelledError(Exception):
    """Ends the writing of one rank; it is never reported, because another rank reports the failure."""


def save(
    directory: Path,
    snapshot: Snapshot,
    comm: Communicator,
    *,
    retention: Retention | None = None,
    control: SaveControl | None = None,
) -> Path:
    """Writes ``directory/step-XXXXXXXX`` from the shards of all ranks; collective and synchronous.

    On return the checkpoint is complete and durable on every rank. On an error every rank raises, nothing exists under
    the checkpoint's name, and the earlier checkpoints are unchanged.

    Args:
        directory: the directory of checkpoints, on a file system that all ranks share; created if missing.
        snapshot: this rank's shards, of the same step on every rank; rank 0's state is stored.
        comm: the ranks that save.
        retention: which checkpoints stay after the commit, ``Retention()`` by default. A damaged checkpoint is neither
            counted nor removed.
        control: lets another thread observe and cancel the save.

    Returns:
        The path of the committed checkpoint.

    Raises:
        CorruptionError: a shard has another fingerprint than ``snapshot.expected``.
        CheckpointError: names the rank and the reason: an error of the file system, shards that do not tile a tensor,
            state that is not JSON, an existing good checkpoint of this step, or another process that holds the
            directory's lease.
    """
    control = control or SaveControl()
    started = time.monotonic()
    directory = local_path(directory, "the directory of checkpoints")
    target = directory / step_name(snapshot.step)
    what = f"saving {target}"
    num_files = comm.world_size if snapshot.num_files is None else snapshot.num_files
    # rank 0 holds the lease from the first clean-up to the removal of older checkpoints
    with ExitStack() as lease_stack:
        begin = on_rank_0_for_long(
            comm,
            what,
            lambda keep_alive: _begin(directory, snapshot, num_files, lease_stack, keep_alive),
            CheckpointError,
        )
        temporary = directory / begin["temporary"]

        def before_block() -> None:
            comm.schedule.progress.advance()
            control.raise_if_cancelled()

        def write() -> dict[str, Any] | None:
            try:
                if snapshot.step != begin["step"]:
                    raise CheckpointError(f"it saves step {snapshot.step}, rank 0 saves step {begin['step']}")
                if comm.rank >= num_files:
                    if snapshot.shards:
                        raise CheckpointError(f"it has shards, and only the first {num_files} ranks write files")
                    return None
                snapshot.ready()
                if comm.rank:  # [Note: cached names]
                    created = partial(os.lstat, temporary)
                    until_seen(created, temporary, f"rank {comm.rank}", "rank 0 has created", before_block)
                path = temporary / f"r{comm.rank:04d}.safetensors"
                report = write_shard_file(path, snapshot.shards, before_block)
                shards = report.pop("shards")
                written = ((s["kind"], s["name"], s["start"], s["fingerprint"]) for s in shards)
                # a text, because only rank 0 reads the shards: those of a thousand ranks are many objects
                rows = json.dumps([[*shard.values()] for shard in shards])
                return {**report, "shards": rows, "unexpected": snapshot.unexpected(written)}
            except _SaveCancelledError:
                return {}
            except Exception:
                # set before the exchange of reports, which waits for ranks that are still writing
                control.failed = True
                raise

        try:
            reports = on_every_rank(comm, what, write, CheckpointError)[:num_files]
            _require_expected(snapshot.step, reports)
            on_rank_0(comm, what, lambda: _commit(temporary, target, _assemble(snapshot, reports)), CheckpointError)
        except (CheckpointError, CorruptionError):
            if comm.rank == 0:
                _warn_on_failure(lambda: _discard(temporary), "removing the failed save")
            raise
        if comm.rank == 0:
            size = sum(report["bytes"] for report in reports)
            seconds = time.monotonic() - started
            logger.info("checkpoint: saved %s (%d bytes, %d files, %.1f s)", target, size, num_files, seconds)
            _warn_on_failure(lambda: _retain(directory, target, retention or Retention()), "removing old checkpoints")
        return target


def _begin(
    directory: Path, snapshot: Snapshot, num_files: int, lease_stack: ExitStack, keep_alive: Callable[[], None]
) -> dict[str, Any]:
    # refuses a state that no load would take before anything is written
    TrainingState.of(stored_state(snapshot.state), step=snapshot.step, num_files=num_files)
    lease = lease_stack.enter_context(hold(directory, while_waiting=keep_alive))
    lease_stack.enter_context(lease.save_lock)  # before clean_up, which would remove another thread's save
    lease.check()
    clean_up(directory)
    target = directory / step_name(snapshot.step)
    if target in committed_checkpoints(directory):
        try:
            verify_checkpoint(target)  # every byte: a good checkpoint is never replaced
        except DamageError as damage:
            logger.warning("checkpoint %s is replaced: %s: %s", target, damage.file, damage.reason)
            quarantine(target, damage.tag)
        else:
            raise CheckpointError(
                f"{target} exists and verifies; a run that resumes from an older step needs a directory of its own "
                "(or move the newer checkpoints away first)"
            )
    temporary = temporary_path(directory, snapshot.step)
    storage.make_directory(temporary)
    return {"temporary": temporary.name, "step": snapshot.step}


def _require_expected(step: int, reports: Sequence[dict[str, Any]]) -> None:
    """Raises ``CorruptionError``, the same on every rank, if a rank wrote other bits than its update had left."""
    found = [
        Corruption((rank,), name, kind, "written to the checkpoint with other bits than its last update wrote")
        for rank, report in enumerate(reports)
        for kind, name in report.get("unexpected", ())
    ]
    if found:
        raise CorruptionError.of_state(step, found)


def _discard(temporary: Path) -> None:
    storage.sync_directory(temporary.parent)  # a reverted rename must be on disk before any file is removed
    remove_tree(temporary)


def _assemble(snapshot: Snapshot, reports: Sequence[dict[str, Any]]) -> Manifest:
    files = tuple(FileEntry(report["file"], report["bytes"], report["hash"], report["digest"]) for report in reports)
    tensors: dict[tuple[str, str], list[tuple[int, WrittenShard]]] = {}
    # reports are in rank order, and so are the files: _entry names a shard's file by its rank
    for rank, report in enumerate(reports):
        for row in json.loads(report["shards"]):
            shard = WrittenShard(*row)
            tensors.setdefault((shard.kind, shard.name), []).append((rank, shard))
    saved_at = datetime.now(UTC).isoformat(timespec="seconds")
    entries = tuple(_entry(shards, files) for _, shards in sorted(tensors.items()))
    return Manifest(snapshot.step, saved_at, stored_state(snapshot.state), files, entries)


def _entry(shards: Sequence[tuple[int, WrittenShard]], files: Sequence[FileEntry]) -> TensorEntry:
    first_rank, first = shards[0]
    label = f"{first.kind}:{first.name}"
    for rank, shard in shards:
        if (shard.dtype, shard.shape) != (first.dtype, first.shape):
            raise CheckpointError(
                f"{label} is {first.dtype} {first.shape} on rank {first_rank} but {shard.dtype} {shard.shape} on rank "
                f"{rank}; the ranks' models differ"
            )
    stored = sorted((item for item in shards if item[1].key), key=lambda item: (item[1].start, item[1].stop))
    intervals = [(shard.start, shard.stop, f"rank {rank}") for rank, shard in stored]
    check_tiling(label, math.prod(first.shape), intervals)
    chunks = tuple(FileInterval(files[rank].name, shard.key, shard.start, shard.stop) for rank, shard in stored)
    fingerprint = sum(shard.fingerprint for _, shard in stored) & MASK
    dtype = DTYPES[first.dtype]
    return TensorEntry(first.name, first.kind, dtype, tuple(first.shape), fingerprint, chunks)


def _commit(temporary: Path, target: Path, manifest: Manifest) -> None:
    # [Note: commit order]
    with hold(target.parent) as lease:  # shared with save()
        try:
            with new_file(temporary / manifests.FILE) as append:
                append(manifest.encode())
            storage.sync_directory(temporary)
            lease.check()
            storage.rename(temporary, target)
        except FileNotFoundError:
            lease.check()  # a process that took the lease over has removed this save: its name is the better message
            raise
    try:
        storage.sync_directory(target.parent)
    except OSError:
        storage.rename(target, temporary)  # a failed save keeps nothing under its name
        raise


def _retain(directory: Path, newest: Path, retention: Retention) -> None:
    with hold(directory) as lease:
        lease.check()  # only the holder deletes, and it may have lost the lease since the rename
    for path in find_expired(directory, retention, newest=newest):
        delete_checkpoint(path)


def _warn_on_failure(work: Callable[[], None], what: str) -> None:
    try:
        work()
    except (CheckpointError, OSError) as error:
        logger.warning("checkpoint: %s failed: %s", what, describe(error))
