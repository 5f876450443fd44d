"""Progress of one rank: its step, its phase, and the collective that it waits for.

Each rank keeps the record in memory that another process may map, so that a watcher can read it while the rank hangs.
The rank writes it with plain stores: it starts no thread for it and makes no system call. The same calls add up how
long the rank was busy in each phase, which is the time it did not wait for other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from time import perf_counter
from typing import Protocol

_NUM_CELLS = 8  # int64 each
_STEP, _PHASE, _NUM_CHANGES, _ENTERED, _LEFT, _LABEL, _NUM_STEPS, _ENDED = range(_NUM_CELLS)
_NUM_LABELS = 256
_LABEL_BYTES = 96
_LABELS_START = 8 * _NUM_CELLS
RECORD_BYTES = _LABELS_START + _NUM_LABELS * _LABEL_BYTES
"""Size of the record in memory."""


class Phase(IntEnum):
    """The call of the engine under way; DATA is the time between two calls, which a loop spends on its data."""

    START = 0
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    UPDATE = 4
    EVALUATION = 5
    SAVE = 6
    LOAD = 7
    COMPILE = 8
    END = 9


class Mark(Protocol):
    def __call__(self, phase: Phase, *, is_waiting: bool) -> None: ...


class Progress:
    """Writes the record of this rank; one thread does.

    Attributes:
        busy_s: seconds in each phase without the waits for other ranks, indexed by ``Phase``, since the start.
        waited_s: seconds of these waits, likewise.
        on_mark: called with the phase, and whether this rank waits, whenever one of the two changes.
    """

    def __init__(self) -> None:
        self.busy_s = [0.0] * len(Phase)
        self.waited_s = [0.0] * len(Phase)
        self.on_mark: Mark | None = None
        self._ids: dict[str, int] = {}  # of the labels in the record
        self._since = perf_counter()
        self._waited_s = 0.0  # of the phase under way
        self._wait_began = 0.0
        self._use(memoryview(bytearray(RECORD_BYTES)))

    def _use(self, memory: memoryview) -> None:
        self._memory = memory
        self._cells = memory[:_LABELS_START].cast("q")

    def move_to(self, memory: memoryview) -> None:
        """Keeps the record in ``memory``, uint8 [RECORD_BYTES] and writable, from now on."""
        memory[:] = self._memory
        self._use(memory)

    @property
    def phase(self) -> Phase:
        """The phase under way."""
        return Phase(self._cells[_PHASE])

    def begin(self, phase: Phase, step: int | None = None) -> None:
        """Ends the phase under way and begins ``phase``.

        Args:
            phase: what this rank does next.
            step: attempted step that it belongs to; None: that of the phase under way.
        """
        now = perf_counter()
        cells = self._cells
        self.busy_s[cells[_PHASE]] += now - self._since - self._waited_s
        self.waited_s[cells[_PHASE]] += self._waited_s
        self._since, self._waited_s = now, 0.0
        if step is not None:
            cells[_STEP] = step
        cells[_PHASE] = phase
        cells[_NUM_CHANGES] += 1
        if self.on_mark is not None:
            self.on_mark(phase, is_waiting=False)

    def end_step(self, step: int) -> None:
        """Ends a step and begins the time until the next one.

        Args:
            step: attempted step that comes next.
        """
        self.begin(Phase.DATA, step)
        self._cells[_NUM_STEPS] += 1

    def advance(self) -> None:
        """Records that the phase under way has come further, because it may take long: it is no hang."""
        self._cells[_NUM_CHANGES] += 1

    @property
    def num_changes(self) -> int:
        """Number that grows with each call; another thread may read it."""
        return self._cells[_NUM_CHANGES]

    @property
    def is_waiting(self) -> bool:
        """Whether this rank waits for the others; another thread may read it."""
        return self._cells[_ENTERED] != self._cells[_LEFT]

    def end(self) -> None:
        """Records that the run is over on this rank: nothing more is to be expected of it."""
        self._cells[_ENDED] = 1

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Begins ``phase``, and DATA at the end of the block."""
        self.begin(phase)
        try:
            yield
        finally:
            self.begin(Phase.DATA)

    def enter(self, number: int, label: str) -> None:
        """Records that this rank waits for collective ``number``."""
        index = self._ids.get(label)
        cells = self._cells
        cells[_LABEL] = self._add_label(label) if index is None else index
        cells[_ENTERED] = number
        cells[_LEFT] = number - 1  # a number may be waited for several times
        cells[_NUM_CHANGES] += 1
        self._wait_began = perf_counter()
        if self.on_mark is not None:
            self.on_mark(self.phase, is_waiting=True)

    def leave(self, number: int) -> None:
        """Records that the wait for collective ``number`` has ended."""
        self._waited_s += perf_counter() - self._wait_began
        self._cells[_LEFT] = number
        if self.on_mark is not None:
            self.on_mark(self.phase, is_waiting=False)

    @contextmanager
    def following(self, other: Progress) -> Iterator[Callable[[], None]]:
        """Yields a function that records in this record what ``other``, of another thread of this rank, has gained."""
        seen: tuple[int, int] | None = None

        def update() -> None:
            nonlocal seen
            record = ProgressRecord.read(other._memory)
            if (record.num_changes, record.left) == seen:
                return
            seen = record.num_changes, record.left
            stop_waiting()
            if record.is_waiting:
                self.enter(record.entered, record.label)
            else:
                self.advance()

        def stop_waiting() -> None:
            if self.is_waiting:
                self.leave(self._cells[_ENTERED])

        try:
            yield update
        finally:
            stop_waiting()

    def _add_label(self, label: str) -> int:
        if len(self._ids) == _NUM_LABELS:
            self._ids.clear()
        index = self._ids[label] = len(self._ids)
        start = _LABELS_START + index * _LABEL_BYTES
        # a character that is cut in two is replaced by the reader
        self._memory[start : start + _LABEL_BYTES] = label.encode()[:_LABEL_BYTES].ljust(_LABEL_BYTES, b"\0")
        return index


@dataclass(frozen=True)
class ProgressRecord:
    """The record of a rank as another process reads it.

    Attributes:
        step: attempted step under way.
        phase: what the rank does.
        num_changes: number that grows with every new phase and every wait; a rank that hangs does not raise it.
        entered: number of the last collective for which the rank began to wait.
        left: number of the last collective for which it has waited; the same number: it does not wait.
        label: name of collective ``entered``.
        num_steps: steps since the start; the first one takes longer than the others.
        has_ended: whether the run is over on this rank.
    """

    step: int
    phase: Phase
    num_changes: int
    entered: int
    left: int
    label: str
    num_steps: int = 1
    has_ended: bool = False

    @classmethod
    def read(cls, memory: memoryview) -> ProgressRecord:
        """Reads ``memory``, uint8 [RECORD_BYTES], which the rank may be writing: fields may be of two moments."""
        cells = memory[:_LABELS_START].cast("q")
        start = _LABELS_START + cells[_LABEL] * _LABEL_BYTES
        label = bytes(memory[start : start + _LABEL_BYTES]).rstrip(b"\0").decode(errors="replace")
        return cls(
            cells[_STEP],
            Phase(cells[_PHASE]),
            cells[_NUM_CHANGES],
            cells[_ENTERED],
            cells[_LEFT],
            label,
            cells[_NUM_STEPS],
            bool(cells[_ENDED]),
        )

    @property
    def is_waiting(self) -> bool:
        """Whether the rank waits for the others."""
        return self.entered != self.left
