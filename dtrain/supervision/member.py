"""A rank as it describes itself to the watcher of its host. Imports no torch."""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import signal
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from dtrain.distributed.processes import process_start
from dtrain.distributed.progress import RECORD_BYTES, Progress
from dtrain.supervision.links import LinkJob


@dataclass(frozen=True)
class Member:
    """A rank of this host, as it describes itself to the watcher.

    Attributes:
        rank: its number.
        pid: its process.
        start: when that process started, see ``process_start``.
        record: descriptor and inode of the file that holds its progress, in that process.
        stacks: the same of the file into which it writes its stacks on SIGUSR2; None: it does not.
    """

    rank: int
    pid: int
    start: str
    record: tuple[int, int]
    stacks: tuple[int, int] | None


@dataclass(frozen=True)
class WatchJob:
    """The arguments of the watcher.

    Attributes:
        members: the ranks of this host.
        world_size: number of ranks of the run.
        limits_s: arguments of ``PhaseLimits``.
        link: how to reach the watchers of the other hosts; None: there are none, or they cannot be reached.
    """

    members: tuple[Member, ...]
    world_size: int
    limits_s: tuple[float, float, float]
    link: LinkJob | None = None

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> WatchJob:
        values = json.loads(text)
        members = tuple(Member(**member) for member in values.pop("members"))
        link = values.pop("link")
        return WatchJob(members, **values, link=None if link is None else LinkJob.decode(link))


def share_progress(rank: int, progress: Progress, held: ExitStack) -> Member:
    """Moves the record to where a watcher of this host can read it, until ``held`` closes."""
    # files without a name: nothing stays behind however this process ends
    record = _open_file("dtrain-progress", held)
    os.posix_fallocate(record, 0, RECORD_BYTES)
    progress.move_to(memoryview(mmap.mmap(record, RECORD_BYTES)))
    stacks = None
    if signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:  # else the program has a use of its own for it
        stacks = _open_file("dtrain-stacks", held)
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True, chain=False)
        held.callback(faulthandler.unregister, signal.SIGUSR2)
    start = process_start("self")
    assert start is not None
    return Member(rank, os.getpid(), start, _identity(record), None if stacks is None else _identity(stacks))


def _open_file(name: str, held: ExitStack) -> int:
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    held.callback(os.close, descriptor)
    return descriptor


def _identity(descriptor: int) -> tuple[int, int]:
    return descriptor, os.fstat(descriptor).st_ino
