"""Retention rules: keep the newest checkpoints, milestones, and the best by validation loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dtrain.checkpoint.directory import committed_checkpoints
from dtrain.checkpoint.format.checked_file import DamageError
from dtrain.checkpoint.format.integrity import verify_checkpoint
from dtrain.distributed.consensus import describe
from dtrain.distributed.logging import logger
from dtrain.errors import CheckpointError


@dataclass(frozen=True)
class Retention:
    """Rules that decide which checkpoints stay; one rule is enough to keep a checkpoint.

    Attributes:
        keep_last: number of newest checkpoints to keep, at least 1.
        keep_every: keep steps that are multiples of this number permanently; 0 disables the rule.
        keep_best: number of checkpoints with the lowest validation loss to keep, the newer of equal ones; 0 disables
            the rule.

    Raises:
        CheckpointError: a number is out of range.

    Examples:
        >>> dtrain.checkpoint.Retention(keep_last=1, keep_every=200).expired(dict.fromkeys([100, 200, 300, 350]))
        [100, 300]
    """

    keep_last: int = 2
    keep_every: int = 0
    keep_best: int = 0

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise CheckpointError(f"keep_last={self.keep_last} would keep no checkpoint; use 1 or more")
        for name in ("keep_every", "keep_best"):
            if getattr(self, name) < 0:
                raise CheckpointError(f"{name}={getattr(self, name)}; expected 0 or more")

    def expired(self, val_losses: Mapping[int, float | None]) -> list[int]:
        """Returns the steps that no rule keeps, in ascending order.

        Args:
            val_losses: step -> validation loss of every checkpoint; None if it has no validation loss.
        """
        steps = sorted(val_losses)
        scored = [(loss, -step) for step, loss in val_losses.items() if loss is not None]
        kept = {*steps[-self.keep_last :], *(-step for _, step in sorted(scored)[: self.keep_best])}
        return [step for step in steps if step not in kept and not (self.keep_every and step % self.keep_every == 0)]


def find_expired(directory: Path, retention: Retention, *, newest: Path | None = None) -> list[Path]:
    """Returns the checkpoints in ``directory`` that ``retention`` does not keep, oldest step first; removes nothing.

    A checkpoint that cannot be read, or whose manifest, sizes or headers are damaged, causes a warning and is neither
    counted nor returned. ``newest`` stays whatever its step is.

    Raises:
        OSError: the directory cannot be listed.
    """
    paths: dict[int, Path] = {}
    val_losses: dict[int, float | None] = {}
    for path in committed_checkpoints(directory):
        try:  # a damaged checkpoint must not take the place of a good one among the newest
            manifest = verify_checkpoint(path, fast=True)
        except DamageError as damage:
            logger.warning("checkpoint %s is damaged: %s: %s", path, damage.file, damage.reason)
            continue
        except OSError as error:
            logger.warning("checkpoint %s cannot be read: %s", path, describe(error))
            continue
        paths[manifest.step] = path
        val_losses[manifest.step] = manifest.metric("val_loss")
    return [paths[step] for step in retention.expired(val_losses) if paths[step] != newest]
