"""One writer per directory of checkpoints: the writer holds a lease, and proves it before every commit.

The lease is a file (``dtrain.checkpoint.lease.lease_file``) into which its holder writes a heartbeat every few
seconds. Another process may take the lease over if the holder's process has ended, or if it sees no heartbeat for a
long time by its own monotonic clock; each takeover has a higher token. Wall time decides nothing.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from dtrain.checkpoint import storage, threads
from dtrain.checkpoint.directory import clean_up, make_directories
from dtrain.checkpoint.lease.lease_file import (
    HEARTBEAT_LIMIT_S,
    LAST_TOKEN,
    NAME,
    TEMPORARY,
    Holder,
    LeaseState,
    path_of,
    read_lease,
    read_lease_file,
)
from dtrain.distributed.consensus import describe
from dtrain.distributed.logging import logger
from dtrain.errors import CheckpointError


@dataclass(frozen=True)
class LeaseTiming:
    heartbeat_s: float = 5.0  # between two heartbeats of the holder
    limit_s: float = HEARTBEAT_LIMIT_S  # without a heartbeat, before the lease may be taken over
    poll_s: float = 0.25  # between two reads by a process that waits
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


TIMING = LeaseTiming()
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
_released_ids: set[str] = set()  # leases that this process released but whose files it could not remove


class Lease:
    """The right to write in a directory, owned by the process that took it."""

    def __init__(self, directory: Path, holder: Holder, descriptor: int) -> None:
        # held during each save, because a save removes whatever it takes for leftovers of another one
        self.save_lock = threading.Lock()
        self._directory = directory
        self._holder = holder
        self._path = path_of(directory, holder.token)
        # heartbeats go to the descriptor, because the path may by now name another holder's file
        self._descriptor = descriptor
        self._process = os.getpid()
        self._lock = threading.Lock()  # keeps readers of this process from a half-written file
        self._released = threading.Event()

    def check(self) -> None:
        """Raises unless the lease file on disk is still this one.

        Raises:
            CheckpointError: another process holds the lease (its identity is in the message), or none does.
            OSError: the lease cannot be read.
        """
        if os.getpid() != self._process:
            raise CheckpointError(f"{self._directory} is held by process {self._process}; this one is a fork of it")
        with self._lock:
            state = read_lease(self._directory)
        if state is None:
            raise CheckpointError(
                f"the lease of {self._directory} is gone: another job took it over and has ended, or somebody removed "
                f"{self._path.name}; nothing more is written there, start this job again"
            )
        if not _is_held_by(state, self._holder):
            raise CheckpointError(
                f"{self._directory} was taken over from this process, {self._holder}, by {state}; nothing more is "
                "written there: one job writes in a directory of checkpoints, stop the other or use another run_dir"
            )

    def write_heartbeat(self) -> None:
        """Increments the heartbeat counter in the lease file; raises ``OSError`` if that fails."""
        with self._lock:
            if not self._released.is_set():
                self._holder = self._holder.with_heartbeat()
                storage.overwrite(self._descriptor, self._holder.encode())
                storage.sync(self._descriptor)  # a network file system shows it to other hosts only then

    def run_heartbeats(self, heartbeat_s: float) -> None:
        """Writes heartbeats until the lease is released or lost; logs an error if it is lost."""
        failing = False
        while not self._released.wait(heartbeat_s):
            try:
                self.write_heartbeat()
                self.check()
                failing = False
            except CheckpointError as lost:
                if not self._released.is_set():
                    logger.error("checkpoint: %s", lost)
                return
            except OSError as error:  # a disk may recover; the lease is lost only when another process takes it
                if not failing:
                    logger.warning(
                        "checkpoint: the heartbeat of the lease of %s failed: %s", self._directory, describe(error)
                    )
                failing = True

    def release(self) -> None:
        """Removes the lease file, so that the next process need not wait; does nothing in a fork or if it was lost."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._released.set()
            _remove_lease_file(self._path, self._holder)
            storage.close(self._descriptor)


class LeaseRequest:
    """One process's repeated attempts to acquire the lease of an existing directory."""

    def __init__(self, directory: Path, timing: LeaseTiming) -> None:
        self._directory = directory
        self._timing = timing
        self._first_seen: LeaseState | None = None
        self._since = 0.0

    def attempt(self) -> Lease | None:
        """Takes the lease if that is allowed now; returns None if the caller has to try again later.

        Raises:
            CheckpointError: the holder is alive; the message names it.
            OSError: the directory cannot be read or written.
        """
        state = read_lease(self._directory)
        if state is None:
            return _take(self._directory, 1)
        if state.holder and (state.holder.id in _released_ids or state.holder.has_ended()):
            logger.info("checkpoint: %s was held by %s, which has ended", self._directory, state)
            return _take(self._directory, state.token + 1)
        # any change of the bytes is a heartbeat, also of a damaged file: only a file that stays the same is abandoned
        now = self._timing.clock()
        if self._first_seen is None:
            self._first_seen, self._since = state, now
            limit = self._timing.limit_s
            logger.info("checkpoint: %s is held by %s; waiting %g s for a heartbeat", self._directory, state, limit)
        if (state.token, state.data) != (self._first_seen.token, self._first_seen.data):
            raise CheckpointError(
                f"{self._directory} is in use by {state}; one job writes in a directory of checkpoints: stop that one, "
                "or use another run_dir"
            )
        if now - self._since < self._timing.limit_s:
            return None
        logger.warning("checkpoint: taking over %s: no heartbeat from %s", self._directory, state)
        return _take(self._directory, state.token + 1)


def acquire(directory: Path, timing: LeaseTiming, while_waiting: Callable[[], None] = lambda: None) -> Lease:
    """Acquires the lease of a directory, which is created if missing; waits while its holder may be alive.

    ``while_waiting`` is called between two attempts. Raises as ``LeaseRequest.attempt``.
    """
    make_directories(directory, while_waiting)
    request = LeaseRequest(directory, timing)
    began = timing.clock()
    while True:
        try:
            if (lease := request.attempt()) is not None:
                return lease
        except OSError as error:
            # a file of an earlier holder that NFS still lists, though it is gone: [Note: cached names]
            if error.errno != errno.ESTALE or timing.clock() - began > timing.limit_s:
                raise
        timing.sleep(timing.poll_s)
        while_waiting()


def _is_held_by(state: LeaseState, holder: Holder) -> bool:
    return state.holder is not None and state.holder.id == holder.id


def _take(directory: Path, token: int) -> Lease | None:
    """Takes the lease with this token and removes leftovers; returns None if another process was first."""
    holder = Holder.this_process(token)
    if token > LAST_TOKEN:
        raise CheckpointError(f"{directory} has the last possible lease; remove it once no job writes there")
    path = path_of(directory, token)
    temporary = path.with_suffix(f".tmp-{holder.id[:8]}")
    with ExitStack() as undo:
        descriptor = storage.create(temporary)
        undo.callback(storage.close, descriptor)
        undo.callback(_remove_lease_file, path, holder)
        try:
            storage.write(descriptor, holder.encode())
            storage.sync(descriptor)  # for other hosts, as in write_heartbeat; no lease needs to survive a power cut
            # a network file system may report that a link exists which it has just made, so the read below decides
            with suppress(FileExistsError, FileNotFoundError):
                storage.link(temporary, path)
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise CheckpointError(f"{directory} is on a file system without hard links; use another") from error
            raise
        finally:
            _remove_if_present(temporary)
        state = read_lease(directory)
        # the first read may be outdated: since then others may have come and gone, one with a higher token
        if state is None or not _is_held_by(state, holder):
            return None
        _clear_leftovers(directory, path)
        undo.pop_all()
    return Lease(directory, holder, descriptor)


def _remove_lease_file(path: Path, holder: Holder) -> None:
    """Removes the lease file if it is still the holder's; remembers it as released if it cannot be removed."""
    try:
        state = read_lease_file(path)
        if state is not None and _is_held_by(state, holder):
            _remove_if_present(path)
    except OSError as error:
        _released_ids.add(holder.id)
        logger.warning("checkpoint: %s could not be removed: %s", path, describe(error))


def _clear_leftovers(directory: Path, own: Path) -> None:
    # all that the previous holder left, so that it cannot commit a save if it resumes
    for name in os.listdir(directory):
        if (NAME.fullmatch(name) or TEMPORARY.fullmatch(name)) and name != own.name:
            _remove_if_present(directory / name)
    clean_up(directory)


def _remove_if_present(path: Path) -> None:
    with suppress(FileNotFoundError):
        storage.remove_file(path)


@dataclass
class _SharedLease:
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while the lease is acquired, possibly for long
    lease: Lease | None = None
    num_users: int = 0


_shared: dict[str, _SharedLease] = {}  # by real path


def _forget_in_fork() -> None:
    for shared in _shared.values():
        shared.lock = threading.Lock()
    _shared.clear()


# the leases belong to the parent, and one of its threads may have held a lock at the fork
os.register_at_fork(after_in_child=_forget_in_fork)


@contextmanager
def hold(
    directory: Path, timing: LeaseTiming | None = None, while_waiting: Callable[[], None] = lambda: None
) -> Iterator[Lease]:
    """Holds the lease of a directory of checkpoints until the block ends, see ``acquire``.

    Nested and concurrent blocks of one process share the lease; the last of them releases it.
    """
    timing = timing or TIMING
    key = os.path.realpath(directory)
    shared = _shared.setdefault(key, _SharedLease())
    with shared.lock:
        if shared.lease is None:
            lease = shared.lease = acquire(Path(key), timing, while_waiting)
            heartbeats = threading.Thread(
                target=lease.run_heartbeats, args=(timing.heartbeat_s,), name="lease", daemon=True
            )
            if not threads.start(heartbeats):  # the lease is checked before each commit, so nothing is overwritten
                logger.warning(
                    "checkpoint: no thread for heartbeats: after %g s another process may take %s over",
                    *(timing.limit_s, key),
                )
        lease = shared.lease
        shared.num_users += 1
    try:
        yield lease
    finally:
        with shared.lock:
            shared.num_users -= 1
            if shared.num_users == 0:
                shared.lease = None
                lease.release()
