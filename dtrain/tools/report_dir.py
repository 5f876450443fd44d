"""The directory into which a tool writes its report."""

from __future__ import annotations

import time
from pathlib import Path

from dtrain.errors import ConfigError


def make_run_dir(run_dir: str | None, tool: str) -> Path:
    """Creates ``run_dir``, or ``runs/<tool>-<date>_<time>`` for None, and returns its absolute path.

    Raises:
        ConfigError: it cannot be created, or it holds files, which may be those of a training run.
    """
    path = Path(run_dir or time.strftime(f"runs/{tool}-%Y-%m-%d_%H-%M-%S")).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        is_empty = not any(path.iterdir())
    except OSError as error:
        raise ConfigError(f"run_dir={error.filename} cannot be created: {error.strerror}; choose another") from error
    if not is_empty:
        raise ConfigError(f"run_dir={path} is not empty; choose a new folder, or leave it null for runs/{tool}-...")
    return path
