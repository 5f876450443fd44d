"""Saving while training goes on: one save at a time, in a thread of each rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary, ref

from dtrain.checkpoint.commit import Attempt, save
from dtrain.checkpoint.directory import step_name
from dtrain.checkpoint.retention import Retention
from dtrain.checkpoint.snapshot import HostCopy, Snapshot, stored_state
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.consensus import describe, on_every_rank
from dtrain.distributed.logging import logger
from dtrain.errors import CheckpointError


class _Thread(threading.Thread):
    """One save on its way. No daemon: an interpreter that ends waits for it, so that it is committed or fails.

    It starts before all ranks have agreed to save, because it may fail to, and then waits for what it saves.
    """

    def __init__(self, path: Path, comm: Communicator, retention: Retention | None) -> None:
        super().__init__(name="dtrain-save")
        self.attempt = Attempt()
        self.path = path
        self.error: Exception | None = None
        self._comm = comm
        self._retention = retention
        self._snapshot: SimpleQueue[Snapshot | None] = SimpleQueue()
        self._earlier: _Thread | None = None

    def save(self, snapshot: Snapshot) -> None:
        """Lets it save ``snapshot``, after the saves of other engines that use the same communicator."""
        newest = _newest.get(self._comm)
        self._earlier = newest() if newest is not None else None
        _newest[self._comm] = ref(self)
        self._snapshot.put(snapshot)

    def dismiss(self) -> None:
        """Lets it end; nothing is saved."""
        self._snapshot.put(None)

    def run(self) -> None:
        snapshot = self._snapshot.get()
        if snapshot is None:
            return
        earlier, self._earlier = self._earlier, None
        if earlier is not None:
            earlier.join()
        try:
            save(self.path.parent, snapshot, self._comm, retention=self._retention, attempt=self.attempt)
        except Exception as error:
            logger.error("checkpoint: %s", describe(error))  # nobody may ask any more
            self.error = error
            self.attempt.failed = True

    def check(self) -> None:
        """Raises what the save has raised; it has ended."""
        if self.error is not None:
            raise self.error


# the last save that was started over each communicator; in one order on all ranks
_newest: WeakKeyDictionary[Communicator, ref[_Thread]] = WeakKeyDictionary()


class Saver:
    """Saves snapshots while their tensors change; on all ranks alike.

    The snapshot is copied to the host, into memory that is kept for the next one. A thread of each rank then saves it
    as :func:`dtrain.checkpoint.save` does, over a communicator of its own: its collectives and those of training never
    meet.

    Args:
        comm: the ranks that save. It is used in the caller's thread only.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._copy = HostCopy(comm.device)
        self._thread_comm: Communicator | None = None
        self._thread: _Thread | None = None
        self._last: Path | None = None

    def prepare(self) -> None:
        """Makes what the first save needs of the other ranks, so that it does not fail for that; all ranks call.

        Raises:
            CommunicationError: a rank has died or hangs.
        """
        if self._thread_comm is None:
            self._thread_comm = self._comm.sibling()

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows that the save under way cannot succeed; asks nobody."""
        return self._thread is not None and self._thread.attempt.failed

    def is_busy(self) -> bool:
        """Whether a save is under way on any rank; all ranks ask together."""
        if self._thread is None:
            return False
        return any(on_every_rank(self._comm, "", self._thread.is_alive, CheckpointError))

    def start(self, directory: Path, snapshot: Snapshot, retention: Retention | None) -> Path:
        """Copies ``snapshot`` and starts to save it; all ranks call, with no save under way.

        On return the snapshot's tensors may change; on a GPU, by work that is queued on the current stream after it.

        Returns:
            The path that the checkpoint will have.

        Raises:
            CheckpointError: a rank could not copy it or start a thread, or its state is not plain JSON.
        """
        assert self._thread is None
        self.prepare()
        assert self._thread_comm is not None
        thread = _Thread(directory / step_name(snapshot.step), self._thread_comm, retention)
        try:
            thread.save(self._copied(snapshot, thread.start))
        except BaseException:
            thread.dismiss()
            raise
        self._thread = thread
        return thread.path

    def save(self, directory: Path, snapshot: Snapshot, retention: Retention | None) -> Path:
        """Saves ``snapshot`` and returns its path once it is committed; all ranks call, with no save under way.

        What lies on a GPU is copied once, as by :meth:`start`: it is written, hashed and fingerprinted from there.

        Raises:
            CheckpointError: as :func:`dtrain.checkpoint.save`.
        """
        if self._comm.device.type == "cuda":
            snapshot = self._copied(snapshot)
        return save(directory, snapshot, self._comm, retention=retention)

    def _copied(self, snapshot: Snapshot, also: Callable[[], None] = lambda: None) -> Snapshot:
        """``snapshot`` on the host, where every rank could make ready for it and do ``also``."""
        state: dict[str, Any] = {}

        def prepare() -> None:
            state.update(stored_state(snapshot.state))  # a copy: what the caller gave may change too
            self._copy.reserve(snapshot)
            also()

        # agreed on before, so that nobody waits for another rank's copy
        on_every_rank(self._comm, f"copying step {snapshot.step} to the host", prepare, CheckpointError)
        return self._copy.take(replace(snapshot, state=state))

    def wait(self) -> Path | None:
        """Returns the path of the last checkpoint of this saver once it is committed, None before any; all ranks call.

        Raises:
            CheckpointError: the save under way has failed; the same on every rank, and raised once.
        """
        thread = self._thread
        if thread is not None:
            thread.join()
            self._thread = None
            on_every_rank(self._comm, "", thread.check, CheckpointError)
            self._last = thread.path
        return self._last

    def fail(self) -> None:
        """Raises the failure of the save under way, which a rank knows of; all ranks call.

        Raises:
            CheckpointError: as :meth:`wait`.
        """
        self._give_up()
        self.wait()

    def leave(self, *, give_up: bool) -> None:
        """Lets the save under way end when this rank stops training by an exception; the other ranks are not asked.

        It may still be committed.

        Args:
            give_up: a rank has gone, so that it cannot be.
        """
        if give_up:
            self._give_up()
        if self._thread is not None:
            self._thread.join()

    def _give_up(self) -> None:
        if self._thread is not None:
            self._thread.attempt.given_up = True
