"""Saving: every rank writes and syncs its file, then rank 0 proves completeness and commits by one rename."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dtrain.checkpoint import storage
from dtrain.checkpoint.directory import committed, quarantine, remove_tree, retire, step_name, sweep, temporary_path
from dtrain.checkpoint.format import manifest as manifests
from dtrain.checkpoint.format.container import DTYPES, DamageError
from dtrain.checkpoint.format.fingerprint import MASK
from dtrain.checkpoint.format.integrity import examine
from dtrain.checkpoint.format.manifest import FileEntry, FileInterval, Manifest, TensorEntry, check_tiling
from dtrain.checkpoint.format.shard_file import Written, new_file, write_shard
from dtrain.checkpoint.lease.lease import hold
from dtrain.checkpoint.retention import Retention, find_retired
from dtrain.checkpoint.snapshot import Snapshot, stored_state
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.consensus import describe, on_every_rank, on_rank_0, on_rank_0_for_long
from dtrain.distributed.logging import logger
from dtrain.errors import CheckpointError


@dataclass
class Attempt:
    """A save under way, as the thread that saves and another one see it.

    Attributes:
        failed: it cannot succeed: this rank's part has failed, whatever the others do.
        given_up: asks this rank to stop writing, because the save fails for what another rank has met with.
    """

    failed: bool = False
    given_up: bool = False

    def proceed(self) -> None:
        """Called before each block that is written; raises :class:`_GivenUpError` where it is in vain."""
        if self.given_up:
            raise _GivenUpError


class _GivenUpError(Exception):
    """Ends the writing of one rank; never seen outside: another rank's failure is what is reported."""


def save(
    directory: Path,
    snapshot: Snapshot,
    comm: Communicator,
    *,
    retention: Retention | None = None,
    attempt: Attempt | None = None,
) -> Path:
    """Writes ``directory/step-XXXXXXXX`` from the pieces of all ranks; collective and synchronous.

    On return the checkpoint is complete and durable, on every rank. On an error there is no trace of it under its
    name, the earlier ones are untouched, and every rank raises.

    Args:
        directory: of the checkpoints, on a file system that all ranks share; made where it does not exist.
        snapshot: this rank's pieces, of the same step on every rank; rank 0's state is stored.
        comm: the ranks that save.
        retention: which checkpoints stay after the commit; None: ``Retention()``. One that is damaged is neither
            counted nor removed.
        attempt: for another thread to follow it.

    Returns:
        The path of the committed checkpoint.

    Raises:
        CheckpointError: names the rank and the reason: the file system's, pieces that do not tile a tensor, state that
            is not JSON, a good checkpoint of this step that is there already, or another process that holds the
            directory's lease.
    """
    attempt = attempt or Attempt()
    began = time.monotonic()
    directory = Path(directory)
    target = directory / step_name(snapshot.step)
    what = f"saving {target}"
    with ExitStack() as held:  # the lease, on rank 0
        begun = on_rank_0_for_long(
            comm, what, lambda go_on_waiting: _begin(directory, snapshot, held, go_on_waiting), CheckpointError
        )
        temporary = directory / begun["temporary"]

        def write() -> dict[str, Any]:
            try:
                if snapshot.step != begun["step"]:
                    raise CheckpointError(f"it saves step {snapshot.step}, rank 0 saves step {begun['step']}")
                snapshot.ready()
                return write_shard(temporary / f"r{comm.rank:04d}.safetensors", snapshot.pieces, attempt.proceed)
            except _GivenUpError:
                return {}
            except Exception:
                attempt.failed = True
                raise

        try:
            reports = on_every_rank(comm, what, write, CheckpointError)
            on_rank_0(comm, what, lambda: _commit(temporary, target, _assemble(snapshot, reports)), CheckpointError)
        except CheckpointError:
            if comm.rank == 0:
                _warn_on_failure(lambda: _discard(temporary), "removing the failed save")
            raise
        if comm.rank == 0:
            size = sum(report["bytes"] for report in reports)
            seconds = time.monotonic() - began
            logger.info("checkpoint: saved %s (%d bytes, %d files, %.1f s)", target, size, comm.world_size, seconds)
            _warn_on_failure(lambda: _retain(directory, target, retention or Retention()), "removing old checkpoints")
        return target


def _begin(directory: Path, snapshot: Snapshot, held: ExitStack, go_on_waiting: Callable[[], None]) -> dict[str, Any]:
    stored_state(snapshot.state)  # refuse what cannot be stored before anything is written
    lease = held.enter_context(hold(directory, meanwhile=go_on_waiting))
    held.enter_context(lease.one_save)
    lease.check()
    sweep(directory)
    target = directory / step_name(snapshot.step)
    if target in committed(directory):
        try:
            examine(target)
        except DamageError as damage:
            logger.warning("checkpoint %s is replaced: %s: %s", target, damage.file, damage.reason)
            quarantine(target, damage.why)
        else:
            raise CheckpointError(
                f"{target} exists and verifies; a run that goes on from an older step needs a directory of its own "
                "(or move the newer checkpoints away first)"
            )
    temporary = temporary_path(directory, snapshot.step)
    storage.make_directory(temporary)
    return {"temporary": temporary.name, "step": snapshot.step}


def _discard(temporary: Path) -> None:
    storage.sync_directory(temporary.parent)  # a rename that was taken back is so on disk, before any file goes
    remove_tree(temporary)


def _assemble(snapshot: Snapshot, reports: Sequence[dict[str, Any]]) -> Manifest:
    files = tuple(FileEntry(report["file"], report["bytes"], report["sha256"]) for report in reports)
    tensors: dict[tuple[str, str], list[tuple[int, Written]]] = {}
    for rank, report in enumerate(reports):
        for item in report["pieces"]:
            written = Written(**item)
            tensors.setdefault((written.kind, written.name), []).append((rank, written))
    saved_at = datetime.now(UTC).isoformat(timespec="seconds")
    entries = tuple(_entry(held, files) for _, held in sorted(tensors.items()))
    return Manifest(snapshot.step, saved_at, stored_state(snapshot.state), files, entries)


def _entry(held: Sequence[tuple[int, Written]], files: Sequence[FileEntry]) -> TensorEntry:
    first_rank, first = held[0]
    label = f"{first.kind}:{first.name}"
    for rank, piece in held:
        if (piece.dtype, piece.shape) != (first.dtype, first.shape):
            raise CheckpointError(
                f"{label} is {first.dtype} {first.shape} on rank {first_rank} but {piece.dtype} {piece.shape} on rank "
                f"{rank}; the ranks' models differ"
            )
    held = sorted((item for item in held if item[1].key), key=lambda item: (item[1].start, item[1].stop))
    intervals = [(piece.start, piece.stop, f"rank {rank}") for rank, piece in held]
    check_tiling(label, math.prod(first.shape), intervals)
    chunks = tuple(FileInterval(files[rank].name, piece.key, piece.start, piece.stop) for rank, piece in held)
    fingerprint = sum(piece.fingerprint for _, piece in held) & MASK
    dtype = DTYPES[first.dtype]
    return TensorEntry(first.name, first.kind, dtype, tuple(first.shape), fingerprint, chunks)


def _commit(temporary: Path, target: Path, manifest: Manifest) -> None:
    with hold(target.parent) as lease:  # the one of this save
        try:
            with new_file(temporary / manifests.FILE) as append:
                append(manifest.encode())
            storage.sync_directory(temporary)
            lease.check()
            storage.rename(temporary, target)
        except FileNotFoundError:
            lease.check()  # whoever took it over has swept this save: that says more
            raise
    try:
        storage.sync_directory(target.parent)
    except OSError:
        storage.rename(target, temporary)  # a save that failed leaves nothing under its name
        raise


def _retain(directory: Path, newest: Path, retention: Retention) -> None:
    with hold(directory) as lease:
        lease.check()
    for path in find_retired(directory, retention, newest=newest):
        retire(path)


def _warn_on_failure(work: Callable[[], None], what: str) -> None:
    try:
        work()
    except (CheckpointError, OSError) as error:
        logger.warning("checkpoint: %s failed: %s", what, describe(error))
