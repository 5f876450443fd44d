"""The engine's part of a folder ``checkpoint-N`` of Trainer, and whether such a folder is complete."""

from __future__ import annotations

import json
from pathlib import Path

from dtrain.checkpoint import verify
from dtrain.distributed.logging import logger
from dtrain.errors import CheckpointError

FOLDER = "dtrain"
"""Name of the folder of the engine's checkpoint in a folder ``checkpoint-N`` of Trainer."""

STATE = "trainer_state.json"
"""Name of the file that Trainer writes last."""


def missing_part(folder: Path) -> str:
    """Returns what is missing or damaged in a folder ``checkpoint-N``; empty if it is complete, or no folder at all."""
    if not folder.is_dir():
        return ""
    try:
        if not (folder / FOLDER).is_dir():
            return f"it has no folder {FOLDER}/, as with save_only_model=True or without dtrain"
        json.loads((folder / STATE).read_text(encoding="utf-8"))
        problems = [status.problem for status in verify(folder / FOLDER, fast=True).checkpoints if status.problem]
    except (OSError, ValueError, CheckpointError) as error:
        return str(error)
    return "; ".join(problems)


def newest_complete(output_dir: Path) -> int:
    """Returns the step of the newest complete checkpoint in ``output_dir``, -1 if there is none."""
    steps = [int(path.name[11:]) for path in output_dir.glob("checkpoint-*") if path.name[11:].isdigit()]
    for step in sorted(steps, reverse=True):
        folder = output_dir / f"checkpoint-{step}"
        missing = missing_part(folder)
        if not missing:
            return step
        logger.warning(f"{folder} is not complete, so an older checkpoint is used: {missing}")
    return -1


def stop_plain_trainer(folder: Path) -> None:
    """Writes two files that plain Trainer cannot load.

    Without them it would resume with fresh optimizer states and the first learning rate, and say nothing.
    """
    note = f"dtrain: the states of this checkpoint are in {FOLDER}/; resume with dtrain.integrations.trainer\n"
    for name in ("optimizer.pt", "scheduler.pt"):
        (folder / name).write_text(note, encoding="utf-8")
