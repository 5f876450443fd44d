"""A shared folder as one host sees it: names that other hosts change are seen late.

Each process is a host. It records its changes in a journal that all share, and hides those of others for a while:
a name that another host has created does not exist yet, one that another host has removed is still listed. A change of
its own in a folder, or opening the folder, shows the folder as it is, unless ``harsh``. Files that are opened are
read as they are (close-to-open). Changes reach the server at once, which decides about names that exist.
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class _Event:
    host: str
    time: float
    path: str
    exists: bool
    is_dir: bool


class CachingFolder:
    """The view of ``host`` on ``root``, once :meth:`install` has replaced the functions of ``os`` in this process.

    The changes of other hosts are not seen for ``stale_s``; ``harsh``: not even by a change of its own or an open.
    """

    def __init__(self, root: Path, journal: Path, host: str, stale_s: float, *, harsh: bool) -> None:
        self._root = os.path.realpath(root)
        self._journal = journal
        self._host = host
        self._stale_s = stale_s
        self._harsh = harsh
        self._refreshed: dict[str, float] = {}
        self._real = {name: getattr(os, name) for name in ("lstat", "stat", "open", "listdir", *_ONE_PATH, *_TWO_PATHS)}
        self._real_io = io.open

    def install(self) -> None:
        for name in self._real:
            setattr(os, name, getattr(self, f"_{name}", None) or self._changing(name))
        for name in ("stat", "lstat"):
            setattr(os, name, partial(self._stats, name))
        io.open = self._io_open  # type: ignore[assignment]

    def uninstall(self) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)
        io.open = self._real_io

    # -- what this host sees -----------------------------------------------------------------------------------------

    def _inside(self, path: Any) -> str | None:
        """Returns the absolute path if it is the root or below it, else None."""
        if isinstance(path, int):
            return None
        text = os.path.abspath(os.fspath(path))
        return text if isinstance(text, str) and f"{text}/".startswith(f"{self._root}/") else None

    def _latest(self) -> dict[str, _Event]:
        """Returns the last event of each path."""
        try:
            with self._real_io(self._journal) as file:
                events = [_Event(*json.loads(line)) for line in file if line.endswith("\n")]
        except FileNotFoundError:
            return {}
        return {event.path: event for event in events}

    def _record(self, path: str, *, exists: bool, is_dir: bool) -> None:
        line = json.dumps([self._host, time.monotonic(), path, exists, is_dir]) + "\n"
        descriptor = self._real["open"](self._journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, line.encode())
        os.close(descriptor)
        if not self._harsh:
            self._refreshed[os.path.dirname(path)] = time.monotonic()

    def _unseen(self, event: _Event) -> bool:
        since = max(time.monotonic() - self._stale_s, self._refreshed.get(os.path.dirname(event.path), 0.0))
        return event.host != self._host and event.time > since

    def _look(self, path: str) -> _Event | None:
        """Raises as a lookup on this host does; returns the removal if the name is gone and still seen."""
        latest = self._latest()
        for parent in [*reversed(Path(path).parents), Path(path)]:
            event = latest.get(str(parent))
            if event is None or not self._unseen(event):
                continue
            if event.exists:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            if str(parent) != path:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
            return event
        return None

    # -- the functions of os -----------------------------------------------------------------------------------------

    def _stats(self, name: str, path: Any, **options: Any) -> os.stat_result:
        inside = self._inside(path)
        if inside is not None and (gone := self._look(inside)) is not None:
            result: os.stat_result = self._real["stat"](self._root if gone.is_dir else self._journal)
            return result
        return self._real[name](path, **options)  # type: ignore[no-any-return]

    def _listdir(self, path: Any = ".") -> list[str]:
        inside = self._inside(path)
        if inside is None:
            return self._real["listdir"](path)  # type: ignore[no-any-return]
        self._reopen(inside)
        names = set(self._real["listdir"](path))
        for event in self._latest().values():
            if os.path.dirname(event.path) == inside and self._unseen(event):
                (names.discard if event.exists else names.add)(os.path.basename(event.path))
        return sorted(names)

    def _reopen(self, folder: str) -> None:
        if (gone := self._look(folder)) is not None:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), gone.path)
        if not self._harsh:
            self._refreshed[folder] = time.monotonic()

    def _open(self, path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        inside = self._inside(path)
        if inside is None:
            return self._real["open"](path, flags, mode, **options)  # type: ignore[no-any-return]
        if flags & os.O_CREAT:
            self._look(os.path.dirname(inside))
        elif self._real_is_dir(inside):
            self._reopen(inside)
        elif self._look(inside) is not None:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), inside)
        descriptor: int = self._real["open"](path, flags, mode, **options)
        if flags & os.O_CREAT:
            self._record(inside, exists=True, is_dir=False)
        return descriptor

    def _real_is_dir(self, path: str) -> bool:
        try:
            return stat.S_ISDIR(self._real["stat"](path).st_mode)
        except OSError:
            return False

    def _io_open(self, file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        inside = self._inside(file)
        if inside is not None:
            self._look(os.path.dirname(inside) if set(mode) & set("wax") else inside)
        opened = self._real_io(file, mode, *arguments, **options)
        if inside is not None and set(mode) & set("wax"):
            self._record(inside, exists=True, is_dir=False)
        return opened

    def _changing(self, name: str) -> Callable[..., None]:
        def call(path: Any, *arguments: Any, **options: Any) -> None:
            inside = self._inside(path)
            if inside is None:
                self._real[name](path, *arguments, **options)
                return
            is_dir = name == "mkdir" or self._real_is_dir(inside)
            self._look(os.path.dirname(inside))
            if name in _TWO_PATHS:
                self._look(os.path.dirname(os.path.abspath(arguments[0])))
            self._real[name](path, *arguments, **options)
            if name != "link":
                self._record(inside, exists=name == "mkdir", is_dir=is_dir)
            if name in _TWO_PATHS:
                self._record(os.path.abspath(arguments[0]), exists=True, is_dir=is_dir)

        return call


_ONE_PATH = ("mkdir", "unlink", "rmdir")
_TWO_PATHS = ("rename", "replace", "link")
