"""Ranks and jobs of two hosts over a shared folder that is slow and caches names, as NFS may."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain.checkpoint import Snapshot, open_newest, save, shared_folder, verify
from dtrain.checkpoint.directory import make_directories
from dtrain.checkpoint.lease.lease import LeaseTiming, hold
from dtrain.checkpoint.retention import Retention
from dtrain.cli.resolve import compose
from dtrain.config.schema import RunConfig, SuperviseConfig
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.startup.setup import connect
from dtrain.errors import CheckpointError
from dtrain.train.run import run_training
from tests.helpers.checkpoints import make_tensors, save_good, shards_of
from tests.helpers.launch import SMALL, losses, summary, train, write_samples
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

STALE_S = 0.5
_ONE_PATH = ("mkdir", "unlink", "rmdir")
_TWO_PATHS = ("rename", "replace", "link")


@dataclass(frozen=True)
class _Event:
    host: str
    time: float
    path: str
    exists: bool
    is_dir: bool


class CachingFolder:
    """The view of ``host`` on ``root``, by functions of ``os`` that it replaces: names of others are seen late.

    Each process is a host. It records its changes in a journal that all share, and hides those of others for
    ``stale_s``: a name that another host has created does not exist yet, one that it has removed is still listed. A
    change of its own in a folder, or opening the folder, shows the folder as it is, unless ``harsh``. Files that are
    opened are read as they are (close-to-open). Changes reach the server at once, which decides about names that exist.
    """

    def __init__(self, root: Path, host: str, *, stale_s: float = STALE_S, harsh: bool = True) -> None:
        self._root, self._journal = os.path.realpath(root), root.with_name("journal")
        self._host, self._stale_s, self._harsh = host, stale_s, harsh
        self._refreshed: dict[str, float] = {}
        self._real = {name: getattr(os, name) for name in ("lstat", "stat", "open", "listdir", *_ONE_PATH, *_TWO_PATHS)}
        self._real_io = io.open
        for name in self._real:
            setattr(os, name, getattr(self, f"_{name}", None) or self._changing(name))
        for name in ("stat", "lstat"):
            setattr(os, name, partial(self._stats, name))
        io.open = self._io_open  # type: ignore[assignment]

    def uninstall(self) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)
        io.open = self._real_io

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


on_hosts = partial(run_ranks, fresh=True, timeout=120)  # because they replace functions of the system


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


def save_step(comm: Communicator, directory: Path, step: int) -> str:
    snapshot = Snapshot(step, shards_of(make_tensors(step), comm.rank, comm.world_size), {})
    return save(directory, snapshot, comm, retention=Retention(keep_last=2)).name


def load_step(comm: Communicator, directory: Path) -> int:
    reader = open_newest(directory, comm)
    for (kind, name), tensor in make_tensors(reader.step).items():
        assert torch.equal(reader.read(kind, name), tensor.reshape(-1))
    return reader.step


def _save_and_load(rank: int, world: int, directory: Path) -> tuple[list[str], int]:
    comm = connect(torch.device("cpu"))
    CachingFolder(directory.parents[1], f"host-{rank}")
    return [save_step(comm, directory, step) for step in (10, 20, 30)], load_step(comm, directory)


def test_ranks_of_two_hosts_save_and_load(root: Path) -> None:
    names, directory = ["step-00000010", "step-00000020", "step-00000030"], root / "run" / "checkpoints"
    assert on_hosts(2, _save_and_load, directory) == [(names, 30)] * 2
    assert sorted(path.name for path in directory.iterdir()) == names[1:]
    assert verify(root / "run").ok


def _save_then_lose_sight(rank: int, world: int, root: Path, verb: str) -> str:
    comm = connect(torch.device("cpu"))
    save_step(comm, root, 10)
    save_step(comm, root, 20)
    shared_folder.LIMIT_S = 0.5
    CachingFolder(root, f"host-{rank}", stale_s=60)
    if rank == 0:  # of the other host, whose cache lasts longer than any
        os.rename(root / "step-00000020", root / "step-00000030.tmp-ab")
        os.rename(root / "step-00000030.tmp-ab", root / "step-00000020")
    comm.barrier()
    began = time.monotonic()
    with pytest.raises(CheckpointError) as failure:
        load_step(comm, root) if verb == "load" else save_step(comm, root, 30)
    assert 0.5 < time.monotonic() - began < 30
    return str(failure.value)


@pytest.mark.parametrize("verb", ["save", "load"])
def test_a_rank_that_never_sees_the_folder_is_named(root: Path, verb: str) -> None:
    """It neither loads an older checkpoint in silence nor makes rank 0 quarantine a good one."""
    first, second = on_hosts(2, _save_then_lose_sight, root, verb)
    assert first == second
    assert "failed on rank 1: rank 1 on host " in first
    claim = "step-00000020, which rank 0 reads" if verb == "load" else ", which rank 0 has created"
    assert claim in first
    assert "though it waited 0.5 s because a network file system may cache names" in first
    assert sorted(path.name for path in root.iterdir()) == ["step-00000010", "step-00000020"]


def _load_timed(rank: int, world: int, root: Path) -> tuple[int, float]:
    comm = connect(torch.device("cpu"))
    CachingFolder(root, f"host-{rank}")
    began = time.monotonic()
    return load_step(comm, root), time.monotonic() - began


def test_a_file_that_is_gone_on_all_hosts_is_refused_at_once(root: Path) -> None:
    for step in (10, 20):
        save_good(root, step)
    (root / "step-00000020" / "r0001.safetensors").unlink()  # of the share of rank 1
    for step, seconds in on_hosts(2, _load_timed, root):
        assert step == 10
        assert seconds < 20
    assert sorted(path.name for path in root.iterdir()) == ["bad-step-00000020-missing", "step-00000010"]


def test_a_folder_that_another_host_has_just_made_is_used(root: Path) -> None:
    """``mkdir`` says that it exists, and only then a lookup does not find it."""
    for host in ("other", "own"):
        folder = CachingFolder(root, host)
        try:
            make_directories(root / "run" / "checkpoints")
            assert (root / "run" / "checkpoints").is_dir()
        finally:
            folder.uninstall()


def _hold_lease(rank: int, world: int, root: Path) -> None:
    """Holds the lease, in which rank 1 fails as long as rank 0 has it."""
    comm = connect(torch.device("cpu"))
    CachingFolder(root, f"host-{rank}")
    timing = LeaseTiming(heartbeat_s=0.1, limit_s=20.0, poll_s=0.05)
    if rank == 0:
        with hold(root, timing):
            comm.barrier()
            comm.barrier()  # rank 1 was refused
        comm.barrier()
        return
    comm.barrier()
    with pytest.raises(CheckpointError, match="is in use by process"), hold(root, timing):
        pass
    comm.barrier()
    comm.barrier()
    with hold(root, timing) as own:
        own.check()


def test_a_job_of_another_host_is_refused_and_later_takes_over(root: Path) -> None:
    on_hosts(2, _hold_lease, root)
    assert list(root.iterdir()) == []


def _train_on_hosts(rank: int, world: int, config: RunConfig, root: Path, hosts: str, log: Path) -> int:
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world), LOCAL_WORLD_SIZE="1")
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), 2)
    CachingFolder(root, hosts[rank], stale_s=5.0, harsh=False)
    return run_training(config)


def test_a_run_moves_to_other_hosts_at_once(root: Path, tmp_path: Path) -> None:
    """The second job begins where the first one ended, on hosts that do not see its last changes."""
    common, log = (*SMALL, write_samples(tmp_path), "schedule=constant"), tmp_path / "log"
    for hosts, steps in (("ab", 4), ("cd", 6)):
        config = compose([*common, f"train.steps={steps}", "train.save_every=2", f"run_dir={root}/run"])
        config = replace(config, supervise=SuperviseConfig(limit_s=60.0, restarts=3))
        assert on_hosts(2, _train_on_hosts, config, root, hosts, log) == [0, 0], log.read_text()
    assert "step-00000004 (saved" in log.read_text()
    assert summary(root / "run")["steps"] == 6
    assert train(tmp_path / "other", *common, "train.steps=6", world=2) == [0, 0]
    assert losses(root / "run") == losses(tmp_path / "other")
