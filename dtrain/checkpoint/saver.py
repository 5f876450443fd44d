"""Saving while training goes on: one save at a time, in a thread of each rank."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from dtrain.checkpoint.directory import step_name
from dtrain.checkpoint.retention import Retention
from dtrain.checkpoint.snapshot import HostCopy, Snapshot, stored_state
from dtrain.checkpoint.writer import Attempt, save
from dtrain.distributed.collectives import Communicator
from dtrain.distributed.consensus import describe, on_every_rank
from dtrain.distributed.logging import logger
from dtrain.errors import CheckpointError


class _Thread(threading.Thread):
    """One save on its way. No daemon: an interpreter that ends waits for it, so that it is committed or fails."""

    def __init__(self, directory: Path, snapshot: Snapshot, comm: Communicator, retention: Retention | None) -> None:
        super().__init__(name="dtrain-save")
        self.attempt = Attempt()
        self.path = directory / step_name(snapshot.step)
        self.error: Exception | None = None
        self._arguments = (directory, snapshot, comm, retention)

    def run(self) -> None:
        directory, snapshot, comm, retention = self._arguments
        try:
            save(directory, snapshot, comm, retention=retention, attempt=self.attempt)
        except Exception as error:
            self.attempt.failed = True
            self.error = error

    def check(self) -> None:
        """Raises what the save has raised; it has ended."""
        if self.error is not None:
            raise self.error


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
            CheckpointError: a rank could not copy it, or its state is not plain JSON.
        """
        assert self._thread is None
        if self._thread_comm is None:
            self._thread_comm = self._comm.sibling()
        state: dict[str, Any] = {}

        def prepare() -> None:
            state.update(stored_state(snapshot.state))  # a copy: what the caller gave may change too
            self._copy.reserve(snapshot)

        # agreed on before, so that nobody waits for another rank's copy
        on_every_rank(self._comm, f"copying step {snapshot.step} to the host", prepare, CheckpointError)
        copy = self._copy.take(replace(snapshot, state=state))
        self._thread = _Thread(directory, copy, self._thread_comm, retention)
        self._thread.start()
        return self._thread.path

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

        It may still be committed. A failure is logged.

        Args:
            give_up: a rank has gone, so that it cannot be.
        """
        if give_up:
            self._give_up()
        if self._thread is not None:
            self._thread.join()
            if self._thread.error is not None:
                logger.warning("checkpoint: the save under way failed too: %s", describe(self._thread.error))

    def _give_up(self) -> None:
        if self._thread is not None:
            self._thread.attempt.given_up = True
