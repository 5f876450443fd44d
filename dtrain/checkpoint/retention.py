"""Which checkpoints stay: the newest, milestones, and the best by validation loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dtrain.checkpoint.directory import committed
from dtrain.checkpoint.format.container import DamageError
from dtrain.checkpoint.format.integrity import examine
from dtrain.distributed.consensus import describe
from dtrain.distributed.logging import logger
from dtrain.errors import CheckpointError


@dataclass(frozen=True)
class Retention:
    """A checkpoint stays where one of the three rules keeps it.

    Attributes:
        keep_last: the newest so many, 1 or more.
        keep_every: those whose step is a multiple of it, for ever; 0: none.
        keep_best: so many of the least validation loss; of equal ones the newer. 0: none.

    Raises:
        CheckpointError: a number is out of range.
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

    def retired(self, val_losses: Mapping[int, float | None]) -> list[int]:
        """The steps that no rule keeps, in ascending order.

        Args:
            val_losses: the validation loss of every checkpoint by its step; None where it has none.
        """
        steps = sorted(val_losses)
        judged = [(loss, -step) for step, loss in val_losses.items() if loss is not None]
        kept = {*steps[-self.keep_last :], *(-step for _, step in sorted(judged)[: self.keep_best])}
        return [step for step in steps if step not in kept and not (self.keep_every and step % self.keep_every == 0)]


def find_retired(directory: Path, retention: Retention, *, newest: Path | None = None) -> list[Path]:
    """The checkpoints in ``directory`` that ``retention`` does not keep, oldest step first; removes nothing.

    One that cannot be read, or is damaged by a look at its manifest, sizes and headers, is warned of; it neither counts
    nor is returned.

    Args:
        directory: of the checkpoints.
        retention: the rules.
        newest: one that stays whatever its step.

    Raises:
        OSError: the directory cannot be listed.
    """
    paths: dict[int, Path] = {}
    val_losses: dict[int, float | None] = {}
    for path in committed(directory):
        try:
            manifest = examine(path, fast=True)
        except DamageError as damage:
            logger.warning("checkpoint %s is damaged: %s: %s", path, damage.file, damage.reason)
            continue
        except OSError as error:
            logger.warning("checkpoint %s cannot be read: %s", path, describe(error))
            continue
        paths[manifest.step] = path
        val_losses[manifest.step] = manifest.metric("val_loss")
    return [paths[step] for step in retention.retired(val_losses) if paths[step] != newest]
