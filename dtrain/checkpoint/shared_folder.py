"""The folder that all ranks share: they name the same one, and wait for files that its cache shows only later.

[Note: one folder] All ranks give one folder, by the same absolute path or by links to the same one. A folder that hosts
mount at different paths needs one name, such as a symbolic link on each: nothing else tells at once that two texts of
different hosts mean the same.

[Note: cached names] A network file system may remember for a minute that a name does not exist (NFS: ``acdirmax``). So
once a rank has reported by message that a file exists, another rank that does not see it looks again, for longer than
any cache keeps names. NFS compares its cache with the server when a folder is opened, so the folders above the file are
opened before each look.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from dtrain.checkpoint.format.checked_file import DamageError
from dtrain.errors import CheckpointError

Result = TypeVar("Result")

LIMIT_S = 90.0
"""Seconds after which a file does not exist; by default, NFS keeps names for at most 60."""
_LISTED = 8  # folders in a message
_PAUSES_S = (0.02, 1.0)  # the first one, and the longest


def folder_names(path: Path) -> tuple[str, str]:
    """Returns the absolute path of a folder, and the one without links; ``require_one_folder`` compares them."""
    return os.path.abspath(path), os.path.realpath(path)


def require_one_folder(what: str, names: Sequence[Sequence[str]]) -> None:
    """Checks that all ranks were given the same folder: [Note: one folder].

    Args:
        what: the work, for the message.
        names: ``folder_names`` of every rank, in rank order.

    Raises:
        CheckpointError: names the ranks and their folders.
    """
    ranks: dict[str, list[str]] = {}
    for rank, (text, real) in enumerate(names):
        if text != names[0][0] and real != names[0][1]:
            ranks.setdefault(text, []).append(str(rank))
    if ranks:
        others = [f"{folder} on rank {', '.join(own)}" for folder, own in ranks.items()]
        more = f", and {len(others) - _LISTED} more" if len(others) > _LISTED else ""
        raise CheckpointError(
            f"{what}: the ranks were given different folders, {names[0][0]} on rank 0, {', '.join(others[:_LISTED])}"
            f"{more}; give all ranks the same one (a relative path counts from a rank's working directory; if hosts "
            f"mount it at different paths, name a symbolic link that each of them has)"
        )


def is_unseen(error: Exception) -> bool:
    """Returns whether an error means that a file does not exist, or that this host's cache is out of date."""
    if isinstance(error, DamageError):
        return error.tag == "missing"
    return isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ESTALE)


def until_seen(
    work: Callable[[], Result],
    path: Path,
    who: str,
    claim: str,
    before_pause: Callable[[], None] = lambda: None,
) -> Result:
    """Returns the result of ``work``, called again as long as it does not find a file at or below ``path``.

    Args:
        work: raises an error for which ``is_unseen`` is true if it finds no file.
        path: what another rank has created.
        who: this rank, for the message.
        claim: why it should exist, for the message, such as ``rank 0 has created``.
        before_pause: may raise to give up.

    Raises:
        CheckpointError: the file is still not seen after ``LIMIT_S`` seconds.
    """
    pause, longest = _PAUSES_S
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            return work()
        except (OSError, DamageError) as error:
            if not is_unseen(error):
                raise
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{who} on host {socket.gethostname()} does not see {path}, which {claim}, though it waited "
                    f"{LIMIT_S:g} s because a network file system may cache names; mount the same folder at this path "
                    "on every host (dtrain doctor folder PATH tests it)"
                ) from error
        before_pause()
        time.sleep(pause)
        pause = min(2 * pause, longest)
        reopen_folders(path)


def reopen_folders(path: Path) -> None:
    """Opens the folders above ``path`` and ``path`` itself, so that NFS asks the server which names they have."""
    for folder in [*reversed(path.absolute().parents), path]:
        with suppress(OSError):
            os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
