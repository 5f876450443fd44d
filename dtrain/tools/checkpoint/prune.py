"""Removing checkpoints that a run no longer needs."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from dtrain.checkpoint.directory import NoCheckpointError, is_single, of_run, retire
from dtrain.checkpoint.format.integrity import examine
from dtrain.checkpoint.lease import lease
from dtrain.checkpoint.report import CheckpointReport, list_checkpoints
from dtrain.checkpoint.retention import Retention, find_retired
from dtrain.distributed.consensus import describe
from dtrain.errors import CheckpointError


@dataclass(frozen=True)
class Pruned:
    """What went, or would go, and what stays; oldest step first."""

    retired: tuple[CheckpointReport, ...]
    kept: tuple[CheckpointReport, ...]


def prune(path: Path | str, retention: Retention, *, dry_run: bool = False) -> Pruned:
    """Removes the checkpoints of a run that ``retention`` does not keep, as the run's own saves would.

    A save of this process into the directory is waited for. The newest ``keep_last`` of those that stay are verified to
    their last byte first: if one is damaged, nothing goes. Those that a look at sizes and headers shows to be damaged
    neither count nor go.

    Args:
        path: a run directory or a directory of checkpoints.
        retention: the rules.
        dry_run: say what would go, and remove nothing.

    Raises:
        NoCheckpointError: there is none.
        CheckpointError: the path does not exist or is one checkpoint, a run holds the lease, one that would stay does
            not verify, or the file system refuses.
    """
    directory = of_run(Path(path))
    if not list_checkpoints(directory):
        raise NoCheckpointError(f"there is no checkpoint in {path}")
    if is_single(directory):
        raise CheckpointError(f"{path} is one checkpoint; give the run directory or the directory that holds it")
    try:
        with ExitStack() as held:
            if not dry_run:
                own = held.enter_context(lease.hold(directory))
                held.enter_context(own.one_save)
            reports = list_checkpoints(directory)
            gone = find_retired(directory, retention)
            kept = tuple(report for report in reports if report.path not in gone)
            if gone:
                _require_good([report.path for report in kept if report.ok][-retention.keep_last :])
            if not dry_run:
                own.check()  # verifying has taken its time
                for checkpoint in gone:
                    retire(checkpoint)
    except OSError as error:
        raise CheckpointError(f"pruning {directory}: {describe(error)}") from error
    return Pruned(tuple(report for report in reports if report.path in gone), kept)


def _require_good(checkpoints: list[Path]) -> None:
    for path in checkpoints:
        try:
            examine(path)
        except CheckpointError as damage:
            raise CheckpointError(
                f"nothing was removed: {path}, which would stay, does not verify ({damage}); move it away and prune "
                "again"
            ) from damage
