"""The order of a rank's collectives, and its waits for them."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from dtrain.distributed.progress import Progress
from dtrain.errors import CommunicationError, DivergenceError, DtrainError

_HASH_MULTIPLIER = 1099511628211  # the 64-bit FNV prime
_HASH_MASK = (1 << 63) - 1  # stays a non-negative int64
_ENDS_S = 0.1  # between the ends of the connections of a process
_LOG_LENGTH = 4096  # collectives of one step that are kept by name
_Key = tuple[str, str, int, torch.dtype, str]
Issued = list[tuple[str, int]]
"""Collectives by name and the hash of that, in their order."""

_REDUCTIONS = ("all_to_all_single", "all_to_all", "reduce_scatter_sum")


class Collective(NamedTuple):
    """A collective in the schedule.

    Attributes:
        number: 1, 2, ... over all collectives since the start.
        entry: operation, label, elements and dtype, and the method of the engine that issued it.
        hash: of all collectives up to this one.
        nbytes: of its tensor, equal on all ranks.
    """

    number: int
    entry: str
    hash: int = 0
    nbytes: int = 0

    def joined(self, first: Collective) -> Collective:
        """Returns the end of a batch of collectives, whose hash covers the others, with the name of ``first`` too."""
        return self if first is self else self._replace(entry=f"{first.entry} .. {self.entry}")

    def on(self, rank: int) -> str:
        """Returns its name in messages of ``rank``."""
        return f"rank {rank}: {self.entry}"


class Transport(Protocol):
    """Connections to other ranks that end with the first failure."""

    def close_failed(self, failure: DtrainError) -> None:
        """Sends ``failure`` to the other ranks and closes the connections, so that none of them waits any longer."""

    def failure_of_others(self) -> DtrainError | None:
        """Returns the failure that another rank has sent, if any has."""

    def ended_ranks(self) -> set[int]:
        """Returns the ranks of the run whose connection has ended, and which have sent no failure before."""


class CollectiveSchedule:
    """The order of the collectives, which the vote compares; the axes of a mesh share one.

    It keeps the first failure: what the ranks have sent after it belongs to other collectives, so every later attempt
    to issue or await one raises it again, before any buffer is read.

    Attributes:
        hash: of all collectives since the start.
        log: those of the current step, by name.
        num_issued: number of collectives since the start.
        on_reduction: called with label and tensor of each all-to-all and reduce-scatter before it starts.
        noted: gets what ``record`` adds; None: nothing does.
        progress: records the waits.
        transports: of this rank over which the collectives go.
        ended_ranks: ranks of the run that had ended, as far as the connections told, at the first failure.
    """

    def __init__(self) -> None:
        self._method = ""
        self._failure: DtrainError | None = None
        self.transports: WeakSet[Transport] = WeakSet()
        self.ended_ranks: set[int] = set()
        self.hash = 0
        self.log: list[str] = []
        self._entries: dict[_Key, tuple[str, int]] = {}  # name and its hash, since most come again in each step
        self.num_issued = 0
        self.on_reduction: Callable[[str, Tensor], None] | None = None
        self.noted: Issued | None = None
        self.progress = Progress()

    def begin_step(self) -> None:
        """Starts the log of one step; the hash covers the whole run."""
        self.log.clear()

    @contextmanager
    def method(self, name: str) -> Iterator[None]:
        """Adds ``name``, a method of the engine, to the collectives of the block.

        The agreements inside ``save`` and ``load`` are alike, and the texts of one would be read as those of the other.
        """
        outer, self._method = self._method, f" in {name}"
        try:
            yield
        finally:
            self._method = outer

    def record(self, op: str, label: str, tensor: Tensor) -> Collective:
        """Adds a collective, dtrain's or a library's."""
        self.require_working()
        # sizes and labels only: reading values would wait for the device
        key = op, label, tensor.numel(), tensor.dtype, self._method
        known = self._entries.get(key) or self._add_entry(key)
        entry = known[0]
        self.repeat((known,))
        if self.noted is not None:
            self.noted.append(known)
        if self.on_reduction is not None and op in _REDUCTIONS:
            self.on_reduction(label, tensor)
        return Collective(self.num_issued, entry, self.hash, tensor.nbytes)

    def note(self) -> Issued:
        """Returns a list that gets all collectives from now on, for ``repeat``."""
        self.noted = []
        return self.noted

    def repeat(self, issued: Iterable[tuple[str, int]]) -> None:
        """Adds collectives that ``note`` has returned, which run once more."""
        for entry, own_hash in issued:
            if len(self.log) < _LOG_LENGTH:
                self.log.append(entry)
            self.num_issued += 1
            self.hash = (self.hash * _HASH_MULTIPLIER ^ own_hash) & _HASH_MASK

    def _add_entry(self, key: _Key) -> tuple[str, int]:
        op, label, numel, dtype, method = key
        if len(self._entries) == _LOG_LENGTH:
            self._entries.clear()
        entry = f"{op}({label}, {numel} x {str(dtype).removeprefix('torch.')}){method}"
        known = self._entries[key] = entry, zlib.crc32(entry.encode())
        return known

    def current(self, entry: str) -> Collective:
        """Returns ``entry``, which is not recorded, under the number of the last collective."""
        return Collective(self.num_issued, f"{entry}{self._method}", self.hash)

    def require_working(self) -> None:
        """Raises the first failure again."""
        if self._failure is not None:
            raise type(self._failure)(str(self._failure)) from self._failure

    def fail(self, rank: int, collective: Collective, error: BaseException) -> BaseException:
        """Keeps the failure of a wait, ends the connections, and returns the error to raise."""
        failure = error
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
            others = (transport.failure_of_others() for transport in list(self.transports))
            failure = next((found for found in others if found is not None), None) or CommunicationError(
                f"{collective.on(rank)} failed: another rank has died, hangs, or issued other collectives; the first "
                f"error of the other ranks says why ({str(error).splitlines()[0][:200]})"
            )
        kept = failure
        if not isinstance(kept, DivergenceError | CommunicationError):  # a failure of this rank alone has its message
            kept = CommunicationError(f"{collective.on(rank)} was interrupted by {type(error).__name__}: {error}")
        if self._failure is None:
            self._failure = kept
            self.ended_ranks = self._find_ended_ranks() if isinstance(kept, CommunicationError) else set()
            for transport in list(self.transports):
                transport.close_failed(kept)
        return failure

    def _find_ended_ranks(self) -> set[int]:
        """Returns the ranks whose connections have ended, which one of them may show a moment before the others."""
        deadline = time.monotonic() + _ENDS_S
        while True:
            ended = {rank for transport in list(self.transports) for rank in transport.ended_ranks()}
            if ended or not self.transports or time.monotonic() > deadline:
                return ended
            time.sleep(0.01)

    def waiting(self, rank: int, collective: Collective) -> Waiting:
        """Returns a context in which this rank waits for ``collective``; it records the wait and names a failure.

        Args:
            rank: of this process in the run.
            collective: see above.
        """
        return Waiting(self, rank, collective)


class Waiting:
    """A wait for other ranks; the backends name an address at best.

    Raises:
        DivergenceError: the ranks issued different collectives.
        CommunicationError: the collective failed, or an earlier one had.
    """

    __slots__ = ("_collective", "_rank", "_schedule")

    def __init__(self, schedule: CollectiveSchedule, rank: int, collective: Collective) -> None:
        self._schedule = schedule
        self._rank = rank
        self._collective = collective

    def __enter__(self) -> None:
        self._schedule.require_working()
        self._schedule.progress.enter(self._collective.number, self._collective.entry)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._schedule.progress.leave(self._collective.number)
        if error is None:
            return
        failure = self._schedule.fail(self._rank, self._collective, error)
        if failure is not error:
            raise failure from error
