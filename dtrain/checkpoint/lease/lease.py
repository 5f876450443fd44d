"""One writer per directory of checkpoints: who writes there holds its lease, and shows it before every commit.

The lease is a file (:mod:`dtrain.checkpoint.lease.lease_file`). Whoever wants it while it is held watches it: a holder
that shows a sign of life keeps it; one whose process has ended, or that shows none for a long time by the watcher's own
monotonic clock, loses it to a lease with a higher number. Wall time decides nothing.
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

from dtrain.checkpoint import storage
from dtrain.checkpoint.directory import make_directories, sweep
from dtrain.checkpoint.lease.lease_file import LAST_TOKEN, NAME, TEMPORARY, Holder, LeaseState, look, look_at, path_of
from dtrain.distributed.consensus import describe
from dtrain.distributed.logging import logger
from dtrain.errors import CheckpointError


@dataclass(frozen=True)
class Pace:
    """How often a holder shows a sign of life, and how long others wait for one.

    Attributes:
        heartbeat_s: between two signs of life.
        limit_s: without one, until the lease may be taken over.
        poll_s: between two looks of one that waits.
        clock: seconds that only go forward.
        sleep: waits for some seconds.
    """

    heartbeat_s: float = 5.0
    limit_s: float = 90.0
    poll_s: float = 0.25
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


PACE = Pace()
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
_given_up: set[str] = set()  # ids of leases of this process whose files could not be removed


class Lease:
    """The right to write in a directory, of the process that took it.

    Args:
        directory: of checkpoints.
        holder: what the lease file says.
        descriptor: the lease file, open for writing. Its signs of life go there and not to a path, which may have
            become another holder's file.
    """

    def __init__(self, directory: Path, holder: Holder, descriptor: int) -> None:
        self.one_save = threading.Lock()
        """Held during each save: it removes what it takes for leftovers."""
        self._directory = directory
        self._holder = holder
        self._path = path_of(directory, holder.token)
        self._descriptor = descriptor
        self._process = os.getpid()
        self._lock = threading.Lock()  # nobody here reads a half-written file
        self._released = threading.Event()

    def check(self) -> None:
        """Makes sure that the lease is still ours, by what lies on the disk now.

        Raises:
            CheckpointError: it is not; names who holds it.
            OSError: the disk does not say.
        """
        if os.getpid() != self._process:
            raise CheckpointError(f"{self._directory} is held by process {self._process}; this one is a fork of it")
        with self._lock:
            state = look(self._directory)
        if state is None:
            raise CheckpointError(
                f"the lease of {self._directory} is gone: another job took it over and has ended, or somebody removed "
                f"{self._path.name}; nothing more is written there, start this job again"
            )
        if not _is(state, self._holder):
            raise CheckpointError(
                f"{self._directory} was taken over from this process, {self._holder}, by {state}; nothing more is "
                "written there: one job writes in a directory of checkpoints, stop the other or use another run_dir"
            )

    def beat(self) -> None:
        """Shows a sign of life.

        Raises:
            OSError: what the file system says.
        """
        with self._lock:
            if not self._released.is_set():
                self._holder = self._holder.alive()
                storage.overwrite(self._descriptor, self._holder.encode())
                storage.sync(self._descriptor)  # a network file system shows it to other hosts only then

    def keep(self, heartbeat_s: float) -> None:
        """Shows signs of life until the lease is released or lost, and says so where it is lost."""
        failing = False
        while not self._released.wait(heartbeat_s):
            try:
                self.beat()
                self.check()
                failing = False
            except CheckpointError as lost:
                if not self._released.is_set():
                    logger.error("checkpoint: %s", lost)
                return
            except OSError as error:  # a disk may recover; the lease is lost only when another takes it
                if not failing:
                    logger.warning(
                        "checkpoint: no sign of life in the lease of %s: %s", self._directory, describe(error)
                    )
                failing = True

    def release(self) -> None:
        """Gives the lease up, for the next one to take at once; nothing where it is lost, or in a fork."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._released.set()
            _give_up(self._path, self._holder)
            storage.close(self._descriptor)


class LeaseRequest:
    """One who wants the lease of a directory.

    Args:
        directory: of checkpoints; it exists.
        pace: the clock, and how long a holder may be silent.
    """

    def __init__(self, directory: Path, pace: Pace) -> None:
        self._directory = directory
        self._pace = pace
        self._seen: LeaseState | None = None
        self._since = 0.0

    def attempt(self) -> Lease | None:
        """Takes the lease if that is allowed now; None: look again later.

        Raises:
            CheckpointError: its holder is alive; names it.
            OSError: what the file system says.
        """
        state = look(self._directory)
        if state is None:
            return _take(self._directory, 1)
        if state.holder and (state.holder.id in _given_up or state.holder.has_ended()):
            logger.info("checkpoint: %s was held by %s, which has ended", self._directory, state)
            return _take(self._directory, state.token + 1)
        now = self._pace.clock()
        if self._seen is None:
            self._seen, self._since = state, now
            limit = self._pace.limit_s
            logger.info("checkpoint: %s is held by %s; waiting %g s for a sign", self._directory, state, limit)
        if (state.token, state.data) != (self._seen.token, self._seen.data):
            raise CheckpointError(
                f"{self._directory} is in use by {state}; one job writes in a directory of checkpoints: stop that one, "
                "or use another run_dir"
            )
        if now - self._since < self._pace.limit_s:
            return None
        logger.warning("checkpoint: taking over %s: no sign of life from %s", self._directory, state)
        return _take(self._directory, state.token + 1)


def take(directory: Path, pace: Pace, meanwhile: Callable[[], None] = lambda: None) -> Lease:
    """Takes the lease of a directory, which is made where it does not exist; waits while its holder may be alive.

    Args:
        directory: of checkpoints.
        pace: of the lease.
        meanwhile: called between two looks of a wait.

    Raises:
        CheckpointError: its holder is alive; names it.
        OSError: what the file system says.
    """
    make_directories(directory)
    contender = LeaseRequest(directory, pace)
    while (lease := contender.attempt()) is None:
        pace.sleep(pace.poll_s)
        meanwhile()
    return lease


def _is(state: LeaseState, holder: Holder) -> bool:
    return state.holder is not None and state.holder.id == holder.id


def _take(directory: Path, token: int) -> Lease | None:
    """Takes the lease with this number, sweeps what others left; None where another was first."""
    holder = Holder.this_process(token)
    if token > LAST_TOKEN:
        raise CheckpointError(f"{directory} has the last possible lease; remove it once no job writes there")
    path = path_of(directory, token)
    temporary = path.with_suffix(f".tmp-{holder.id[:8]}")
    with ExitStack() as undo:
        descriptor = storage.create(temporary)
        undo.callback(storage.close, descriptor)
        undo.callback(_give_up, path, holder)
        try:
            storage.write(descriptor, holder.encode())
            storage.sync(descriptor)  # for other hosts, as in Lease.beat; after a power cut no lease means anything
            # a network file system may say 'exists' of a link that it has just made, so the next look decides
            with suppress(FileExistsError, FileNotFoundError):
                storage.link(temporary, path)
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise CheckpointError(f"{directory} is on a file system without hard links; use another") from error
            raise
        finally:
            _remove(temporary)
        state = look(directory)
        # what was seen before may be old: others may have come and gone, and one be there with a higher number
        if state is None or not _is(state, holder):
            return None
        _clear(directory, path)
        undo.pop_all()
    return Lease(directory, holder, descriptor)


def _give_up(path: Path, holder: Holder) -> None:
    """Removes a lease file, but not one that has become another's; what cannot be removed means nothing from now on."""
    try:
        state = look_at(path)
        if state is not None and _is(state, holder):
            _remove(path)
    except OSError as error:
        _given_up.add(holder.id)
        logger.warning("checkpoint: %s stays: %s", path, describe(error))


def _clear(directory: Path, ours: Path) -> None:
    """Removes all that the holder before has left, so that a save of its, were it to go on, cannot be committed."""
    for name in os.listdir(directory):
        if (NAME.fullmatch(name) or TEMPORARY.fullmatch(name)) and name != ours.name:
            _remove(directory / name)
    sweep(directory)


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):
        storage.remove_file(path)


@dataclass
class _LeaseDirectory:
    """A directory, as this process sees it."""

    lock: threading.Lock = field(default_factory=threading.Lock)  # held while the lease is taken: that may take long
    lease: Lease | None = None
    count: int = 0


_places: dict[str, _LeaseDirectory] = {}  # by real path


def _forget() -> None:
    for place in _places.values():
        place.lock = threading.Lock()
    _places.clear()


os.register_at_fork(after_in_child=_forget)  # the leases are the parent's, and a thread of its may have had a lock


@contextmanager
def hold(directory: Path, pace: Pace | None = None, meanwhile: Callable[[], None] = lambda: None) -> Iterator[Lease]:
    """Holds the lease of a directory of checkpoints until the block ends; :func:`take` says how it is had.

    Where this process holds it already, this is the same lease, and it is released with the last block.

    Raises:
        CheckpointError: another process holds it, and is alive.
        OSError: what the file system says.
    """
    pace = pace or PACE
    key = os.path.realpath(directory)
    place = _places.setdefault(key, _LeaseDirectory())
    with place.lock:
        if place.lease is None:
            place.lease = take(Path(key), pace, meanwhile)
            keeper = threading.Thread(target=place.lease.keep, args=(pace.heartbeat_s,), name="lease", daemon=True)
            keeper.start()
        lease = place.lease
        place.count += 1
    try:
        yield lease
    finally:
        with place.lock:
            place.count -= 1
            if place.count == 0:
                place.lease = None
                lease.release()
