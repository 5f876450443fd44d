"""Files and folders of samples as a configuration names them."""

from __future__ import annotations

import os

from dtrain.config.data import ArraysDataConfig, ImagesDataConfig
from dtrain.errors import ConfigError


def expanded(name: str) -> str:
    """Returns a path with its variables and ``~`` replaced, without a slash at its end."""
    return os.path.expandvars(os.path.expanduser(name)).rstrip("/") or "/"


def require_other(config: ArraysDataConfig | ImagesDataConfig, kind: str) -> None:
    """Checks that ``validation_path`` is another file or folder than ``path``, whatever both are called; they exist.

    Args:
        kind: ``file`` or ``folder``, for the message.

    Raises:
        ConfigError: both are the same one.
    """
    if config.validation_path is not None and os.path.samefile(expanded(config.validation_path), expanded(config.path)):
        raise ConfigError(
            f"data.validation_path={config.validation_path} is the {kind} data.path={config.path}, which is trained "
            f"on; name another {kind}, or null"
        )
