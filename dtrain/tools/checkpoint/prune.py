"""``dtrain checkpoint prune``: deletes checkpoints that a run no longer needs."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from dtrain.checkpoint.directory import NoCheckpointError, checkpoints_dir, delete_checkpoint, is_single_checkpoint
from dtrain.checkpoint.format.integrity import verify_checkpoint
from dtrain.checkpoint.inspection import CheckpointStatus, list_checkpoints
from dtrain.checkpoint.lease import lease
from dtrain.checkpoint.retention import Retention, find_expired
from dtrain.distributed.consensus import describe
from dtrain.errors import CheckpointError
from dtrain.local_paths import local_path


@dataclass(frozen=True)
class Pruned:
    """Checkpoints that were (or would be) deleted, and those that stay; oldest step first."""

    deleted: tuple[CheckpointStatus, ...]
    kept: tuple[CheckpointStatus, ...]


def prune(path: Path | str, retention: Retention, *, dry_run: bool = False) -> Pruned:
    """Deletes the checkpoints of a run that ``retention`` does not keep, as the run's own saves would.

    Waits for a save of this process into the directory. The newest ``keep_last`` of the checkpoints that stay are
    verified completely first, and if one is damaged, nothing is deleted. Checkpoints with damaged manifests, sizes or
    headers are neither counted nor deleted.

    Args:
        path: a run directory or a directory of checkpoints.
        retention: the rules.
        dry_run: only report what would be deleted.

    Raises:
        NoCheckpointError: there is no checkpoint.
        CheckpointError: the path does not exist or is one checkpoint, a run holds the lease, a checkpoint that would
            stay does not verify, or the file system reports an error.
    """
    directory = checkpoints_dir(local_path(path, "the path of checkpoints"))
    if not list_checkpoints(directory):
        raise NoCheckpointError(f"there is no checkpoint in {path}")
    if is_single_checkpoint(directory):
        raise CheckpointError(f"{path} is one checkpoint; give the run directory or the directory that holds it")
    try:
        with ExitStack() as leases:
            if not dry_run:
                own = leases.enter_context(lease.hold(directory))
                leases.enter_context(own.save_lock)
            reports = list_checkpoints(directory)
            expired = find_expired(directory, retention)
            kept = tuple(report for report in reports if report.path not in expired)
            if expired:
                _require_good([report.path for report in kept if report.ok][-retention.keep_last :])
            if not dry_run:
                own.check()  # the verification may have taken long
                for checkpoint in expired:
                    delete_checkpoint(checkpoint)
    except OSError as error:
        raise CheckpointError(f"pruning {directory}: {describe(error)}") from error
    return Pruned(tuple(report for report in reports if report.path in expired), kept)


def _require_good(checkpoints: list[Path]) -> None:
    for path in checkpoints:
        try:
            verify_checkpoint(path)
        except CheckpointError as damage:
            raise CheckpointError(
                f"nothing was deleted: {path}, which would stay, does not verify ({damage}); move it away and prune "
                "again"
            ) from damage
