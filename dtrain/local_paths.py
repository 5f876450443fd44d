"""Paths of a file system as users name them: ``~`` is the home folder, and URLs are refused.

``Path("s3://bucket/run")`` would be a local folder ``s3:``, and ``Path("~/run")`` one called ``~``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from dtrain.errors import ConfigError

# "//" may already be "/", because pathlib joins slashes; one letter is a drive
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:[:/]")


def local_path(path: str | os.PathLike[str], what: str) -> Path:
    """Returns ``path`` with ``~`` replaced by the home folder, see ``require_local``."""
    require_local(path, what)
    return Path(os.path.expanduser(path))


def require_local(path: str | os.PathLike[str], what: str) -> None:
    """Raises ``ConfigError`` if a path is a URL, such as that of an object store.

    Args:
        path: as the user gave it.
        what: the key or function that takes it, for the message.
    """
    text = os.fspath(path)
    if _URL.match(text):
        raise ConfigError(
            f"{what} is the URL {text}; expected a path, because dtrain uses folders of a file system only: a commit "
            "renames a folder, creates the lease's file exclusively and syncs both to disk, and object stores have no "
            "such operations. Copy inputs to a local or shared folder, train there, and copy finished checkpoints away "
            "(aws s3 sync or rclone copy, without '*.tmp-*' and 'lease-*'); after copying back, dtrain checkpoint "
            "verify FOLDER. A local folder of such a name: ./NAME"
        )
