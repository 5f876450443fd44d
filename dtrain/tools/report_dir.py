"""The directory into which a tool writes its report."""

from __future__ import annotations

import time
from pathlib import Path

from dtrain.errors import ConfigError, directory_error


def make_run_dir(run_dir: str | None, tool: str) -> Path:
    """Creates ``run_dir``, or ``runs/<tool>-<date>_<time>`` for None, and returns its absolute path.

    Raises:
        ConfigError: as ``make_empty_dir``.
    """
    return make_empty_dir(Path(run_dir or time.strftime(f"runs/{tool}-%Y-%m-%d_%H-%M-%S")), "run_dir")


def make_empty_dir(path: Path, key: str) -> Path:
    """Creates the directory at ``path``, or takes an empty one, and returns its absolute path.

    Args:
        key: names the directory on the command line, for the error.

    Raises:
        ConfigError: it cannot be created, or it holds files, which may be those of a training run.
        StorageError: the disk is full or faulty.
    """
    path = path.absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        is_empty = not any(path.iterdir())
    except OSError as error:
        raise directory_error(key, error.filename or path, error) from error
    if not is_empty:
        raise ConfigError(f"{key}={path} is not empty; choose a new folder")
    return path
