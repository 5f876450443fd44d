"""Listing and verifying checkpoints in one process, without loading them or changing anything."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dtrain.checkpoint.directory import NoCheckpointError, checkpoints_dir, committed_checkpoints, is_single_checkpoint
from dtrain.checkpoint.format.checked_file import DamageError
from dtrain.checkpoint.format.integrity import check_contents, load_manifest
from dtrain.checkpoint.lease.lease_file import read_lease
from dtrain.distributed.consensus import describe
from dtrain.errors import CheckpointError
from dtrain.local_paths import local_path


@dataclass(frozen=True)
class CheckpointStatus:
    """State of one checkpoint on disk; fields that a damaged manifest does not provide are None.

    Attributes:
        path: its directory.
        problem: ``FILE: REASON`` if the checkpoint must not be used, else None.
        step: number of attempted steps at the save.
        saved_at: wall time of the save, ISO 8601 in UTC.
        num_bytes: total size of the data files.
        num_files: number of the data files.
        world_size: number of ranks that saved it.
        engine: name of the engine that saved it.
        train_loss: loss of the last applied step before the save.
        val_loss: loss of an evaluation at that step, if there was one.
    """

    path: Path
    problem: str | None
    step: int | None = None
    saved_at: str | None = None
    num_bytes: int | None = None
    num_files: int | None = None
    world_size: int | None = None
    engine: str | None = None
    train_loss: float | None = None
    val_loss: float | None = None

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return self.problem is None


@dataclass(frozen=True)
class VerificationReport:
    """Result of ``verify``: ``checkpoints`` has the state of each one under a path, oldest step first."""

    checkpoints: tuple[CheckpointStatus, ...]

    @property
    def ok(self) -> bool:
        """Whether every checkpoint is good."""
        return all(checkpoint.ok for checkpoint in self.checkpoints)


def verify(path: Path | str, *, fast: bool = False) -> VerificationReport:
    """Checks the checkpoints under a path and returns the state of each; renames nothing.

    Args:
        path: a run directory, its directory of checkpoints, or one checkpoint.
        fast: check manifests, names, sizes and headers only, without reading the data.

    Raises:
        NoCheckpointError: there is no checkpoint.
        CheckpointError: the path does not exist or cannot be listed.

    Examples:
        >>> engine = dtrain.initialize(torch.nn.Linear(4, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = engine.save(folder)
        ...     [(status.path.name, status.ok) for status in dtrain.checkpoint.verify(folder).checkpoints]
        [('step-00000000', True)]
    """
    statuses = _statuses(path, fast)
    if not statuses:
        raise NoCheckpointError(f"there is no checkpoint in {path}")
    return VerificationReport(tuple(statuses))


def list_checkpoints(path: Path | str) -> list[CheckpointStatus]:
    """Lists the checkpoints under a path as ``verify(path, fast=True)`` does; returns [] if there is none.

    Raises:
        CheckpointError: the path does not exist or cannot be listed.
    """
    return _statuses(path, fast=True)


def lease_holder(path: Path | str) -> str | None:
    """Describes the process that holds the lease of a run's checkpoints; None if there is none or for one checkpoint.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    path = local_path(path, "the path of checkpoints")
    if is_single_checkpoint(path):
        return None
    try:
        state = read_lease(checkpoints_dir(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be listed: {describe(error)}") from error
    return str(state) if state else None


def newest_checkpoint(path: Path | str) -> Path:
    """Returns the checkpoint at ``path``, or the newest one of a run directory or directory of checkpoints.

    Raises:
        NoCheckpointError: there is no checkpoint.
        CheckpointError: the path does not exist or cannot be listed.
    """
    paths = _find(path)
    if not paths:
        raise NoCheckpointError(f"there is no checkpoint in {path}")
    return paths[-1]


@contextmanager
def path_in_errors(checkpoint: Path) -> Iterator[None]:
    """Adds the checkpoint's path to a ``DamageError`` of the block; turns an ``OSError`` into a ``CheckpointError``."""
    try:
        yield
    except DamageError as damage:
        raise DamageError(str(checkpoint / damage.file), damage.reason, damage.tag) from damage
    except OSError as error:
        raise CheckpointError(f"{checkpoint} cannot be read: {describe(error)}") from error


def _find(path: Path | str) -> list[Path]:
    path = local_path(path, "the path of checkpoints")
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist; give a run directory, its checkpoints/ or one step-... directory"
        )
    try:
        return [path.resolve()] if is_single_checkpoint(path) else committed_checkpoints(checkpoints_dir(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be listed: {describe(error)}") from error


def _statuses(path: Path | str, fast: bool) -> list[CheckpointStatus]:
    statuses = (_status(checkpoint, fast) for checkpoint in _find(path))
    # a checkpoint that was deleted while it was read is not damaged
    return [status for status in statuses if status.ok or os.path.lexists(status.path)]


def _status(path: Path, fast: bool) -> CheckpointStatus:
    manifest = problem = None
    try:
        manifest = load_manifest(path)
        check_contents(path, manifest, fast=fast)
    except CheckpointError as damage:
        problem = str(damage)
    except OSError as error:
        problem = f"cannot be read: {describe(error)}"
    if manifest is None:
        return CheckpointStatus(path, problem)
    return CheckpointStatus(
        path,
        problem,
        step=manifest.step,
        saved_at=manifest.saved_at,
        num_bytes=sum(file.bytes for file in manifest.files),
        num_files=len(manifest.files),
        world_size=len(manifest.files) if manifest.training is None else manifest.training.world_size,
        engine=_text(manifest.state.get("engine")),
        train_loss=manifest.metric("train_loss"),
        val_loss=manifest.metric("val_loss"),
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
