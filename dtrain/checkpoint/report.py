"""Looking at checkpoints without loading them, in one process and changing nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dtrain.checkpoint.directory import NoCheckpointError, committed, is_single, of_run
from dtrain.checkpoint.integrity import examine, load_manifest
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
    """

    path: Path
    problem: str | None
    step: int | None = None
    saved_at: str | None = None
    num_bytes: int | None = None
    num_files: int | None = None
    world_size: int | None = None

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


def _reports(path: Path, fast: bool) -> list[CheckpointReport]:
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist; give a run directory, its checkpoints/ or one step-... directory"
        )
    try:
        paths = [path.resolve()] if is_single(path) else committed(of_run(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be listed: {describe(error)}") from error
    return [_report(checkpoint, fast) for checkpoint in paths]


def _report(path: Path, fast: bool) -> CheckpointReport:
    problem = None
    try:
        examine(path, fast=fast)
    except CheckpointError as damage:
        problem = str(damage)
    except OSError as error:
        problem = f"cannot be read: {describe(error)}"
    try:
        manifest = load_manifest(path)
    except (CheckpointError, OSError):
        return CheckpointReport(path, problem)
    return CheckpointReport(
        path,
        problem,
        step=manifest.step,
        saved_at=manifest.saved_at,
        num_bytes=sum(file.bytes for file in manifest.files),
        num_files=len(manifest.files),
        world_size=len(manifest.files),
    )
