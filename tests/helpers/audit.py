"""Records forbidden acts of this process by audit events: code, processes, sockets, files outside a folder."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_FORBIDDEN = (
    "pickle.", "marshal.", "exec", "compile", "import", "code.", "ctypes.", "socket.", "subprocess.", "os.system",
    "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.startfile", "os.kill", "pty.", "shutil.", "webbrowser.",
)  # fmt: skip
_AT_A_PATH = ("open", "os.listdir", "os.scandir", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link")
_OF_A_PROCESS = re.compile(r"/proc/(self|\d+)/stat|/proc/sys/kernel/random/boot_id", re.ASCII)  # read for the lease
_watching: list[tuple[Path, list[str]]] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if not _watching:
        return
    folder, seen = _watching[-1]
    if event.startswith(_FORBIDDEN) and event != "socket.gethostname":
        seen.append(f"{event} {args!r:.200}")
    elif event in _AT_A_PATH:
        path = args[0]
        if event == "open" and _opens_a_folder_above(args, folder):
            return
        if not isinstance(path, str | bytes | os.PathLike) or not _is_harmless(os.fsdecode(path), folder):
            seen.append(f"{event} {path!r:.200}")


def _opens_a_folder_above(args: tuple[Any, ...], folder: Path) -> bool:
    """Whether a folder above ``folder`` is opened as such, which reads nothing (NFS looks again)."""
    path, _, flags = args
    return isinstance(path, str) and bool(flags & os.O_DIRECTORY) and folder.is_relative_to(path)


def _is_harmless(path: str, folder: Path) -> bool:
    # ".." counts; links do not, because they are not to be followed
    return Path(os.path.abspath(path)).is_relative_to(folder) or _OF_A_PROCESS.fullmatch(path) is not None


def install() -> None:
    """Adds the hook to this process; audit hooks cannot be removed."""
    sys.addaudithook(_hook)


@contextmanager
def watched(folder: Path) -> Iterator[list[str]]:
    """Yields the list of forbidden acts in the block; files inside ``folder`` are allowed."""
    seen: list[str] = []
    _watching.append((folder, seen))
    try:
        yield seen
    finally:
        _watching.pop()
