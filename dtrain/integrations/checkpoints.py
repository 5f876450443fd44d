"""The engines' part of a folder of ``accelerator.save_state``: a checkpoint of dtrain for each engine."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain.distributed.consensus import on_rank_0
from dtrain.errors import CheckpointError
from dtrain.integrations.driver import EngineDriver

_FOLDER = "dtrain"


class SavedByEngine(dict[str, Any]):
    """Stands in accelerate's list of weights for a model whose engine saves them."""


_CURRENT = "current.json"


def save_engines(drivers: Sequence[EngineDriver], folder: Path, extra: Mapping[str, Any]) -> None:
    """Writes a checkpoint of each engine under ``folder``; all ranks call.

    ``folder/dtrain/current.json`` names the subfolder that holds them. It changes when all are complete, and only then
    those of an earlier save to the same folder are removed.

    Raises:
        CheckpointError: any rank failed.
    """
    if not drivers:
        return
    comm, home = drivers[0].engine.comm, folder / _FOLDER
    name = on_rank_0(comm, f"saving {home}", lambda: _free_name(home), CheckpointError)
    for number, driver in enumerate(drivers):
        driver.close()
        driver.engine.save(home / name / f"model_{number}", extra=extra)
    on_rank_0(comm, f"saving {home}", lambda: _commit(home, name, len(drivers)), CheckpointError)


def load_engines(drivers: Sequence[EngineDriver], folder: Path) -> list[dict[str, Any]]:
    """Loads the checkpoint of each engine under ``folder`` and returns their ``extra``; all ranks call.

    Raises:
        CheckpointError: there is none, or it is of other models.
    """
    if not drivers:
        return []
    comm, home = drivers[0].engine.comm, folder / _FOLDER
    current = on_rank_0(comm, f"loading {home}", lambda: _current(home), CheckpointError)
    if current["num_engines"] != len(drivers):
        raise CheckpointError(
            f"{home} holds {current['num_engines']} engines, and {len(drivers)} are prepared; prepare the models and "
            f"optimizers that were saved, in their order"
        )
    for driver in drivers:
        driver.close()
    return [driver.engine.load(home / current["save"] / f"model_{number}") for number, driver in enumerate(drivers)]


def _saves(home: Path) -> list[Path]:
    return [path for path in home.glob("save-*") if path.is_dir()]


def _free_name(home: Path) -> str:
    taken = [int(path.name.removeprefix("save-")) for path in _saves(home) if path.name[5:].isdigit()]
    return f"save-{max(taken, default=0) + 1}"


def _commit(home: Path, name: str, num_engines: int) -> None:
    temporary = home / f".{_CURRENT}"
    temporary.write_text(json.dumps({"save": name, "num_engines": num_engines}))
    os.replace(temporary, home / _CURRENT)
    for path in _saves(home):
        if path.name != name:
            shutil.rmtree(path, ignore_errors=True)


def _current(home: Path) -> dict[str, Any]:
    path = home / _CURRENT
    try:
        values: dict[str, Any] = json.loads(path.read_text())
        return {"save": str(values["save"]), "num_engines": int(values["num_engines"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); expected a folder that dtrain's Accelerator.save_state has written"
        ) from error
