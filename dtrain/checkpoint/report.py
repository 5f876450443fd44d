"""Looking at checkpoints without loading them, in one process and changing nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dtrain.checkpoint.directory import NoCheckpointError, committed, is_single, of_run
from dtrain.checkpoint.format.container import DamageError
from dtrain.checkpoint.format.integrity import check_contents, load_manifest
from dtrain.checkpoint.lease.lease_file import look
from dtrain.distributed.consensus import describe
from dtrain.errors import CheckpointError


@dataclass(frozen=True)
class CheckpointReport:
    """One checkpoint as it stands on disk; what a damaged manifest does not tell is None.

    Attributes:
        path: its directory.
        problem: ``FILE: REASON`` where it must not be used, else None.
        step: attempted steps when it was saved.
        saved_at: wall time, ISO 8601 in UTC.
        num_bytes: of the data files.
        num_files: data files.
        world_size: ranks that saved it.
        engine: that saved it.
        train_loss: of the last step before.
        val_loss: of an evaluation at that step; None where there was none.
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
class Report:
    """The checkpoints under a path, oldest step first."""

    checkpoints: tuple[CheckpointReport, ...]

    @property
    def ok(self) -> bool:
        """Whether all of them are good."""
        return all(checkpoint.ok for checkpoint in self.checkpoints)


def verify(path: Path | str, *, fast: bool = False) -> Report:
    """Checks the checkpoints under a path; nothing is renamed.

    Args:
        path: a run directory, its directory of checkpoints, or one checkpoint.
        fast: check manifests, names, sizes and headers, and do not read the data.

    Raises:
        NoCheckpointError: there is none.
        CheckpointError: the path does not exist or cannot be listed.
    """
    reports = _reports(Path(path), fast)
    if not reports:
        raise NoCheckpointError(f"there is no checkpoint in {path}")
    return Report(tuple(reports))


def list_checkpoints(path: Path | str) -> list[CheckpointReport]:
    """What is under a path, oldest step first and without reading the data; as ``verify(path, fast=True)``, or [].

    Raises:
        CheckpointError: the path does not exist or cannot be listed.
    """
    return _reports(Path(path), fast=True)


def holder(path: Path | str) -> str | None:
    """Who may write in a run's directory of checkpoints, in words; None where nobody holds it, or it is one checkpoint.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    path = Path(path)
    if is_single(path):
        return None
    try:
        sight = look(of_run(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be listed: {describe(error)}") from error
    return str(sight) if sight else None


def find_one(path: Path | str) -> Path:
    """The checkpoint at ``path``, or the newest of a run directory or directory of checkpoints.

    Raises:
        NoCheckpointError: there is none.
        CheckpointError: the path does not exist or cannot be listed.
    """
    paths = _find(Path(path))
    if not paths:
        raise NoCheckpointError(f"there is no checkpoint in {path}")
    return paths[-1]


@contextmanager
def naming(checkpoint: Path) -> Iterator[None]:
    """Gives the damage that the block meets the checkpoint's whole path, and what the file system refuses a reason.

    Raises:
        DamageError: as raised in the block.
        CheckpointError: an ``OSError`` was.
    """
    try:
        yield
    except DamageError as damage:
        raise DamageError(str(checkpoint / damage.file), damage.reason, damage.why) from damage
    except OSError as error:
        raise CheckpointError(f"{checkpoint} cannot be read: {describe(error)}") from error


def _find(path: Path) -> list[Path]:
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist; give a run directory, its checkpoints/ or one step-... directory"
        )
    try:
        return [path.resolve()] if is_single(path) else committed(of_run(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be listed: {describe(error)}") from error


def _reports(path: Path, fast: bool) -> list[CheckpointReport]:
    reports = (_report(checkpoint, fast) for checkpoint in _find(path))
    # one that was retired while it was read is no damage
    return [report for report in reports if report.ok or os.path.lexists(report.path)]


def _report(path: Path, fast: bool) -> CheckpointReport:
    manifest = problem = None
    try:
        manifest = load_manifest(path)
        check_contents(path, manifest, fast=fast)
    except CheckpointError as damage:
        problem = str(damage)
    except OSError as error:
        problem = f"cannot be read: {describe(error)}"
    if manifest is None:
        return CheckpointReport(path, problem)
    return CheckpointReport(
        path,
        problem,
        step=manifest.step,
        saved_at=manifest.saved_at,
        num_bytes=sum(file.bytes for file in manifest.files),
        num_files=len(manifest.files),
        world_size=len(manifest.files),
        engine=_text(manifest.state.get("engine")),
        train_loss=manifest.metric("train_loss"),
        val_loss=manifest.metric("val_loss"),
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
