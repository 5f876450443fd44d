"""Saving: every rank writes and syncs its file, then rank 0 proves completeness and commits by one rename."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dtrain.checkpoint import manifest as manifests
from dtrain.checkpoint import storage
from dtrain.checkpoint.container import DTYPES, DamageError, dtype_name, encode_header
from dtrain.checkpoint.directory import (
    committed,
    make_directories,
    quarantine,
    remove_tree,
    retire,
    step_name,
    sweep,
    temporary_path,
)
from dtrain.checkpoint.fingerprint import MASK, fingerprint_bytes, host_blocks
from dtrain.checkpoint.integrity import examine
from dtrain.checkpoint.manifest import Chunk, FileEntry, Manifest, TensorEntry, check_tiling, stored_shape
from dtrain.checkpoint.snapshot import Piece, Snapshot, stored_state
from dtrain.distributed.collectives import Communicator
from dtrain.distributed.consensus import describe, on_every_rank, on_rank_0
from dtrain.distributed.logging import logger
from dtrain.errors import CheckpointError


@dataclass(frozen=True)
class _Written:
    """What a rank reports of a piece: as in :class:`Piece`, with the key in its file ("" where it has no elements)."""

    kind: str
    name: str
    dtype: str
    shape: list[int]
    start: int
    stop: int
    key: str
    fingerprint: int


def save(directory: Path, snapshot: Snapshot, comm: Communicator, *, keep_last: int = 2) -> Path:
    """Writes ``directory/step-XXXXXXXX`` from the pieces of all ranks; collective and synchronous.

    On return the checkpoint is complete and durable, on every rank. On an error there is no trace of it under its
    name, the earlier ones are untouched, and every rank raises.

    Args:
        directory: of the checkpoints, on a file system that all ranks share; made where it does not exist.
        snapshot: this rank's pieces, of the same step on every rank; rank 0's state is stored.
        comm: the ranks that save.
        keep_last: after the commit, older checkpoints than the newest ``keep_last`` are removed (1 or more). One that
            is damaged is neither counted nor removed.

    Returns:
        The path of the committed checkpoint.

    Raises:
        CheckpointError: names the rank and the reason: the file system's, pieces that do not tile a tensor, state that
            is not JSON, or a good checkpoint of this step that is there already.
    """
    if keep_last < 1:
        raise CheckpointError(f"keep_last={keep_last} would keep no checkpoint; use 1 or more")
    began = time.monotonic()
    directory = Path(directory)
    target = directory / step_name(snapshot.step)
    what = f"saving {target}"
    attempt = on_rank_0(comm, what, lambda: _begin(directory, snapshot), CheckpointError)
    temporary = directory / attempt["temporary"]

    def write() -> dict[str, Any]:
        if snapshot.step != attempt["step"]:
            raise CheckpointError(f"it saves step {snapshot.step}, rank 0 saves step {attempt['step']}")
        return _write_file(temporary / f"r{comm.rank:04d}.safetensors", snapshot.pieces)

    try:
        reports = on_every_rank(comm, what, write, CheckpointError)
        on_rank_0(comm, what, lambda: _commit(temporary, target, _assemble(snapshot, reports)), CheckpointError)
    except CheckpointError:
        if comm.rank == 0:
            _warn_on_failure(lambda: remove_tree(temporary), "removing the failed save")
        raise
    if comm.rank == 0:
        size = sum(report["bytes"] for report in reports)
        seconds = time.monotonic() - began
        logger.info("checkpoint: saved %s (%d bytes, %d files, %.1f s)", target, size, comm.world_size, seconds)
        _warn_on_failure(lambda: _retain(directory, target, keep_last), "removing old checkpoints")
    return target


def _begin(directory: Path, snapshot: Snapshot) -> dict[str, Any]:
    stored_state(snapshot.state)  # refuse what cannot be stored before anything is written
    make_directories(directory)
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


@contextmanager
def _new_file(path: Path) -> Iterator[Callable[[bytes | memoryview], None]]:
    """Gives a function that appends to a new file, which is durable when the block ends without an error."""
    descriptor = storage.create(path)
    try:
        yield lambda data: storage.write(descriptor, data)
        storage.sync(descriptor)
    finally:
        storage.close(descriptor)


def _keyed(pieces: Iterable[Piece]) -> dict[str, Piece]:
    """The pieces that have elements by their key in the file, wide dtypes first so that all lie aligned."""
    keyed: dict[str, Piece] = {}
    for piece in sorted(pieces, key=lambda piece: -piece.dtype.itemsize):
        if piece.start < piece.stop:
            key = f"{piece.kind}:{piece.name}"
            while key in keyed:
                key += f"@{piece.start}"
            keyed[key] = piece
    return keyed


def _write_file(path: Path, pieces: Iterable[Piece]) -> dict[str, Any]:
    keyed = _keyed(pieces)
    header = encode_header(
        [(key, piece.dtype, stored_shape(piece.shape, piece.stop - piece.start)) for key, piece in keyed.items()]
    )
    digest, size, written = hashlib.sha256(header), len(header), []
    with _new_file(path) as append:
        append(header)
        for key, piece in keyed.items():
            total, index = 0, piece.start
            for block in host_blocks(piece.data):
                digest.update(block)  # of the memory, before it goes to the disk
                total += fingerprint_bytes(block, piece.dtype.itemsize, index)
                append(block)
                index += len(block) // piece.dtype.itemsize
                size += len(block)
            written.append(_report(piece, key, total & MASK))
    written += [_report(piece, "", 0) for piece in pieces if piece.start == piece.stop]
    return {"file": path.name, "bytes": size, "sha256": digest.hexdigest(), "pieces": written}


def _report(piece: Piece, key: str, fingerprint: int) -> dict[str, Any]:
    dtype = dtype_name(piece.dtype)
    return vars(_Written(piece.kind, piece.name, dtype, list(piece.shape), piece.start, piece.stop, key, fingerprint))


def _assemble(snapshot: Snapshot, reports: Sequence[dict[str, Any]]) -> Manifest:
    files = tuple(FileEntry(report["file"], report["bytes"], report["sha256"]) for report in reports)
    tensors: dict[tuple[str, str], list[tuple[int, _Written]]] = {}
    for rank, report in enumerate(reports):
        for item in report["pieces"]:
            written = _Written(**item)
            tensors.setdefault((written.kind, written.name), []).append((rank, written))
    saved_at = datetime.now(UTC).isoformat(timespec="seconds")
    entries = tuple(_entry(held, files) for _, held in sorted(tensors.items()))
    return Manifest(snapshot.step, saved_at, stored_state(snapshot.state), files, entries)


def _entry(held: Sequence[tuple[int, _Written]], files: Sequence[FileEntry]) -> TensorEntry:
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
    chunks = tuple(Chunk(files[rank].name, piece.key, piece.start, piece.stop) for rank, piece in held)
    fingerprint = sum(piece.fingerprint for _, piece in held) & MASK
    dtype = DTYPES[first.dtype]
    return TensorEntry(first.name, first.kind, dtype, tuple(first.shape), fingerprint, chunks)


def _commit(temporary: Path, target: Path, manifest: Manifest) -> None:
    with _new_file(temporary / manifests.FILE) as append:
        append(manifest.encode())
    storage.sync_directory(temporary)
    storage.rename(temporary, target)
    try:
        storage.sync_directory(target.parent)
    except OSError:
        storage.rename(target, temporary)  # a save that failed leaves nothing under its name
        raise


def _retain(directory: Path, newest: Path, keep_last: int) -> None:
    kept = 0
    for path in reversed(committed(directory)):
        try:
            examine(path, fast=True)
        except DamageError as damage:
            logger.warning("checkpoint %s is damaged: %s: %s", path, damage.file, damage.reason)
            continue
        kept += 1
        if kept > keep_last and path != newest:
            retire(path)


def _warn_on_failure(work: Callable[[], None], what: str) -> None:
    try:
        work()
    except OSError as error:
        logger.warning("checkpoint: %s failed: %s", what, describe(error))
