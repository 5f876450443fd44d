"""States of a disk after a power cut: a recorder of file system changes, and a model of which of them are durable.

The recorder wraps ``dtrain.checkpoint.storage``. The model keeps what POSIX promises and nothing more:

- Bytes written to a file but not fsynced may be present, lost, torn at any byte, or zeros in any block, even if the
  file has its full length.
- Each name created or removed in a directory since its last fsync may be as before or as after, independently of the
  others; an fsync of a file does not make its name durable. A rename is atomic.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from inspect import isfunction
from pathlib import Path
from typing import Any

import pytest

from dtrain.checkpoint import storage

FUNCTIONS = tuple(name for name, value in vars(storage).items() if isfunction(value) and not name.startswith("_"))
_BLOCKS = (512, 4096)
State = dict[str, "bytes | None"]
"""Content of a disk: path below the root -> bytes of the file; None for a directory."""


@dataclass(frozen=True)
class Call:
    """A successful call of ``storage``, or ``returned`` when a save returned, with its step as ``data``."""

    name: str
    paths: tuple[str, ...] = ()
    data: bytes = b""

    def __str__(self) -> str:
        return " ".join([self.name, *self.paths])


class Recorder:
    """Records all changes below ``root``, by any thread, in order."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[Call] = []
        self._root = root
        self._lock = threading.RLock()
        self._open: dict[int, str] = {}
        for name in FUNCTIONS:
            patch.setattr(storage, name, self._wrap(name, getattr(storage, name)))

    def returned(self, step: int) -> None:
        self.calls.append(Call("returned", data=str(step).encode()))

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self._lock:
                result = real(*args)
                paths = self._paths(args)
                if name == "create" and paths:
                    self._open[result] = paths[0]
                if paths:
                    self.calls.append(Call(name, paths, bytes(args[1]) if name in ("write", "overwrite") else b""))
            return result

        return call

    def _paths(self, args: tuple[Any, ...]) -> tuple[str, ...]:
        """Returns the paths of a call below the root; none if it concerns another directory."""
        if isinstance(args[0], int):
            return (self._open[args[0]],) if args[0] in self._open else ()
        return tuple(str(path.relative_to(self._root)) for path in args if path.is_relative_to(self._root))


@dataclass
class _File:
    durable: bytes = b""
    live: bytes = b""


@dataclass
class _Directory:
    durable: dict[str, int] = field(default_factory=dict)
    live: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Change:
    """A name that a node gains, loses, or both (a rename); durable once its directories are fsynced."""

    node: int
    old: tuple[int, str] | None
    new: tuple[int, str] | None


class Disk:
    """A directory tree, durable at first, to which recorded calls are applied, and what a power cut may leave of it."""

    def __init__(self, root: Path) -> None:
        self._numbers = itertools.count()
        self._nodes: dict[int, _File | _Directory] = {}
        self._pending: list[_Change] = []
        self._root = self._read(root)

    def _read(self, path: Path) -> int:
        number = next(self._numbers)
        if path.is_dir():
            entries = {name: self._read(path / name) for name in sorted(os.listdir(path))}
            self._nodes[number] = _Directory(dict(entries), dict(entries))
        else:
            self._nodes[number] = _File(path.read_bytes(), path.read_bytes())
        return number

    def would_change(self, sync: Call) -> bool:
        """Whether an fsync makes anything durable that was not."""
        number = self._find(sync.paths[0]) if sync.name == "sync_directory" else -1
        return sync.name == "sync" or any(number in _directories(change) for change in self._pending)

    def _returned(self, call: Call) -> None:
        pass

    _close = _returned

    def _make_directory(self, call: Call) -> None:
        self._add(call.paths[0], _Directory())

    def _create(self, call: Call) -> None:
        self._add(call.paths[0], _File())

    def _write(self, call: Call) -> None:
        self._file(call.paths[0]).live += call.data

    def _overwrite(self, call: Call) -> None:
        file = self._file(call.paths[0])
        file.live = call.data + file.live[len(call.data) :]

    def _sync(self, call: Call) -> None:
        file = self._file(call.paths[0])
        file.durable = file.live

    def _sync_directory(self, call: Call) -> None:
        number = self._find(call.paths[0])
        for change in [change for change in self._pending if number in _directories(change)]:
            _move(self._nodes, change, lambda directory: directory.durable)
            self._pending.remove(change)

    def _rename(self, call: Call) -> None:
        source, target = (self._entry(path) for path in call.paths)
        self._change(_Change(self._find(call.paths[0]), source, target))

    def _link(self, call: Call) -> None:
        self._change(_Change(self._find(call.paths[0]), None, self._entry(call.paths[1])))

    def _remove_file(self, call: Call) -> None:
        self._change(_Change(self._find(call.paths[0]), self._entry(call.paths[0]), None))

    _remove_directory = _remove_file

    def _add(self, path: str, node: _File | _Directory) -> None:
        number = next(self._numbers)
        self._nodes[number] = node
        self._change(_Change(number, None, self._entry(path)))

    def _change(self, change: _Change) -> None:
        _move(self._nodes, change, lambda directory: directory.live)
        self._pending.append(change)

    def _entry(self, path: str) -> tuple[int, str]:
        folder, name = os.path.split(path)
        return self._find(folder), name

    def _find(self, path: str) -> int:
        number = self._root
        for name in Path(path).parts:
            directory = self._nodes[number]
            assert isinstance(directory, _Directory)
            number = directory.live[name]
        return number

    def _file(self, path: str) -> _File:
        file = self._nodes[self._find(path)]
        assert isinstance(file, _File)
        return file

    def plain_states(self) -> Iterator[State]:
        """Yields states with none, all, all but one, or one of the pending names; each with data kept and lost."""
        count = len(self._pending)
        everything = frozenset(range(count))
        subsets = {frozenset(), everything}
        subsets |= {kept for index in range(count) for kept in (everything - {index}, frozenset({index}))}
        for kept in sorted(subsets, key=sorted):
            yield self._state(kept, lambda file: file.live)
            yield self._state(kept, lambda file: file.durable)

    def random_state(self, rng: random.Random) -> State:
        """Returns a state with random pending names and randomly torn files."""
        share = rng.choice((0.1, 0.5, 0.9))
        kept = frozenset(index for index in range(len(self._pending)) if rng.random() < share)
        return self._state(kept, lambda file: torn(file.durable, file.live, rng))

    def _state(self, kept: Iterable[int], content: Callable[[_File], bytes]) -> State:
        tables = {n: _Directory(dict(d.durable)) for n, d in self._nodes.items() if isinstance(d, _Directory)}
        for index in sorted(kept):
            _move(tables, self._pending[index], lambda directory: directory.durable)
        state: State = {}

        def visit(number: int, path: str) -> None:
            node = self._nodes[number]
            if isinstance(node, _File):
                state[path] = content(node)
                return
            state[path] = None
            for name, inner in sorted(tables[number].durable.items()):
                visit(inner, f"{path}/{name}".lstrip("/"))

        visit(self._root, "")
        return state


def _directories(change: _Change) -> set[int]:
    return {entry[0] for entry in (change.old, change.new) if entry is not None}


def _move(nodes: Any, change: _Change, table: Callable[[_Directory], dict[str, int]]) -> None:
    """Applies a change to the tables of names, even if earlier changes were lost."""
    if change.old is not None:
        names = table(nodes[change.old[0]])
        is_there = names.get(change.old[1]) == change.node
        if is_there:
            del names[change.old[1]]
        elif change.new is not None and isinstance(nodes.get(change.node), _Directory):
            for name in [name for name, number in names.items() if number == change.node]:
                del names[name]  # a directory has one name: here the one before a lost rename
    if change.new is not None:
        table(nodes[change.new[0]])[change.new[1]] = change.node


def torn(durable: bytes, live: bytes, rng: random.Random) -> bytes:
    """Returns possible content of a file whose last writes were not fsynced."""
    kind = rng.choice(("all", "none", "cut", "zeros", "blocks"))
    if kind == "all" or live == durable:
        return live
    if kind == "none":
        return durable
    equal = (one == other for one, other in zip(durable, live, strict=False))
    begin = sum(itertools.takewhile(bool, equal))
    end = rng.randint(begin, len(live))
    if kind == "cut":
        return live[:end] + durable[end:]
    if kind == "zeros":
        return live[:begin] + bytes(end - begin)
    block = rng.choice(_BLOCKS)
    blocks = (live[start : min(start + block, end)] for start in range(begin, end, block))
    return live[:begin] + b"".join(bytes(len(item)) if rng.random() < 0.5 else item for item in blocks)


def write_state(state: State, root: Path) -> None:
    """Creates the files and directories of a state below ``root``, which does not exist yet."""
    for path, data in state.items():  # a directory comes before what is in it
        if data is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(data)


def cuts(start: Path, calls: Sequence[Call]) -> Iterator[tuple[int, int, Disk]]:
    """Yields (number of calls, last step returned or -1, disk) for a power cut before the first call and after each.

    ``start`` is the tree before the first call.
    """
    disk, step = Disk(start), -1
    yield 0, step, disk
    for number, call in enumerate(calls, 1):
        getattr(disk, f"_{call.name}")(call)
        if call.name == "returned":
            step = int(call.data)
        yield number, step, disk
