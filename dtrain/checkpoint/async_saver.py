"""Asynchronous saving: one save at a time, in a thread of each rank, while training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary, ref

from dtrain.checkpoint.commit import SaveControl, save
from dtrain.checkpoint.directory import step_name
from dtrain.checkpoint.retention import Retention
from dtrain.checkpoint.snapshot import HostCopy, Snapshot, stored_state
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.consensus import describe, on_every_rank
from dtrain.distributed.logging import logger
from dtrain.errors import CheckpointError, CorruptionError

_POLL_S = 0.5  # between two looks at the progress of a thread


class _SaveThread(threading.Thread):
    """Thread of one save. It is no daemon, so the interpreter waits at exit until the save is committed or failed.

    It is started before the ranks agree to save, because the start itself may fail, and then waits for its snapshot.
    """

    def __init__(self, path: Path, comm: Communicator, retention: Retention | None) -> None:
        super().__init__(name="dtrain-save")
        self.control = SaveControl()
        self.path = path
        self.error: Exception | None = None
        self._comm = comm
        self._retention = retention
        self._snapshot: SimpleQueue[Snapshot | None] = SimpleQueue()
        self._earlier: _SaveThread | None = None

    def submit(self, snapshot: Snapshot) -> None:
        # the collectives of two saves over one communicator must not interleave, so the thread waits for the last one
        newest = _newest.get(self._comm)
        self._earlier = newest() if newest is not None else None
        _newest[self._comm] = ref(self)
        self._snapshot.put(snapshot)

    def abandon(self) -> None:
        self._snapshot.put(None)

    def run(self) -> None:
        snapshot = self._snapshot.get()
        if snapshot is None:
            return
        earlier, self._earlier = self._earlier, None
        if earlier is not None:
            earlier.join()
        try:
            save(self.path.parent, snapshot, self._comm, retention=self._retention, control=self.control)
        except Exception as error:
            logger.error("checkpoint: %s", describe(error))  # the training thread may never call wait() again
            self.error = error
            self.control.failed = True

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error


# latest save started over each communicator; saves start in the same order on all ranks
_newest: WeakKeyDictionary[Communicator, ref[_SaveThread]] = WeakKeyDictionary()


class AsyncSaver:
    """Saves snapshots while training changes their tensors. All ranks make the same calls.

    Each snapshot is copied to host memory, which is reused for the next one. A thread of each rank then saves the copy
    as ``dtrain.checkpoint.save`` does, over its own communicator, so its collectives cannot interleave with those
    of training.

    Args:
        comm: the ranks that save; used in the caller's thread only.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._copy = HostCopy(comm.device)
        self._thread_comm: Communicator | None = None
        self._thread: _SaveThread | None = None
        self._last: Path | None = None

    def prepare(self) -> None:
        """Creates the communicator of the saving threads; collective. Call it early to keep this out of the first save.

        Raises:
            CommunicationError: a rank has died or hangs.
        """
        if self._thread_comm is None:
            self._thread_comm = self._comm.sibling()

    @property
    def has_failed(self) -> bool:
        """Whether the current save is known to fail on this rank; not collective."""
        return self._thread is not None and self._thread.control.failed

    def is_busy(self) -> bool:
        """Whether a save is in progress on any rank; collective."""
        if self._thread is None:
            return False
        return any(on_every_rank(self._comm, "", self._thread.is_alive, CheckpointError))

    def start(self, directory: Path, snapshot: Snapshot, retention: Retention | None) -> Path:
        """Copies ``snapshot`` and starts to save it as ``dtrain.checkpoint.save`` does; collective, one at a time.

        On return the snapshot's tensors may change; on a GPU, through work queued later on the current stream.

        Returns:
            The path that the checkpoint will have.

        Raises:
            CheckpointError: a rank could not copy the snapshot or start a thread, or the state is not plain JSON.
        """
        assert self._thread is None
        self.prepare()
        assert self._thread_comm is not None
        thread = _SaveThread(directory / step_name(snapshot.step), self._thread_comm, retention)
        try:
            thread.submit(self._copied(snapshot, thread.start))
        except BaseException:
            thread.abandon()
            raise
        self._thread = thread
        return thread.path

    def save(self, directory: Path, snapshot: Snapshot, retention: Retention | None) -> Path:
        """Saves ``snapshot`` and returns its path once it is committed; collective. No save may be in progress.

        GPU tensors are copied to the host once, as in ``start``, then written, hashed and fingerprinted there; what
        lies on the host is written as it is, because nothing changes it meanwhile.

        Raises:
            CheckpointError: as ``dtrain.checkpoint.save``.
        """
        if self._comm.device.type == "cuda":
            on_host = [shard for shard in snapshot.shards if shard.data.device.type == "cpu"]
            others = [shard for shard in snapshot.shards if shard.data.device.type != "cpu"]
            copied = self._copied(replace(snapshot, shards=tuple(others)))
            snapshot = replace(copied, shards=(*copied.shards, *on_host))
        return save(directory, snapshot, self._comm, retention=retention)

    def _copied(self, snapshot: Snapshot, also: Callable[[], None] = lambda: None) -> Snapshot:
        """Returns a host copy of ``snapshot``, after all ranks have reserved memory and run ``also``."""
        state: dict[str, Any] = {}

        def prepare() -> None:
            state.update(stored_state(snapshot.state))  # a copy, because the caller may change the state too
            self._copy.reserve(snapshot)
            also()

        # agree before copying, so that no rank waits for another rank's copy
        on_every_rank(self._comm, f"copying step {snapshot.step} to the host", prepare, CheckpointError)
        return self._copy.take(replace(snapshot, state=state))

    def wait(self) -> Path | None:
        """Waits for the current save and returns the path of the last committed one (None before any); collective.

        Raises:
            CheckpointError: the save has failed; the same error on every rank, raised once.
            CorruptionError: it found other bits than it was to write; likewise.
        """
        thread = self._thread
        if thread is not None:
            self._join(thread)
            self._thread = None
            try:
                on_every_rank(self._comm, "", thread.raise_error, CheckpointError)
            except CheckpointError:
                if isinstance(thread.error, CorruptionError):  # on all ranks, whose threads have agreed on it
                    raise thread.error from None
                raise
            self._last = thread.path
        return self._last

    def raise_failure(self) -> None:
        """Cancels the current save, which a rank reported as failed, and raises its failure; collective.

        Raises:
            CheckpointError, CorruptionError: as ``wait``.
        """
        self._cancel()
        self.wait()

    def shut_down(self, *, cancel: bool) -> None:
        """Waits for the current save after an exception ended training on this rank; not collective.

        The save may still be committed.

        Args:
            cancel: stop writing, because a rank has gone and the save can no longer be committed.
        """
        if cancel:
            self._cancel()
        if self._thread is not None:
            self._join(self._thread)

    def _join(self, thread: _SaveThread) -> None:
        """Waits for the thread, whose progress and waits for other ranks are this rank's meanwhile."""
        assert self._thread_comm is not None
        with self._comm.schedule.progress.following(self._thread_comm.schedule.progress) as update:
            while thread.is_alive():
                update()
                thread.join(_POLL_S)

    def _cancel(self) -> None:
        if self._thread is not None:
            self._thread.control.cancel_requested = True
