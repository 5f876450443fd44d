"""Names the rank that is slower than the others.

The ranks wait for each other in every step, so their step times are equal. What differs is the time in which a rank is
busy: the step without its waits. It travels as one number in the vote, so every rank sees the numbers of all, and they
name the same rank.

[Note: busy time on a GPU] The host runs ahead of the device, so its own times say little. In every fifth step the
device records an event at each phase and around each wait. They are read when the window ends, in a later step, which
has read the recorded step's decision first, so all of them have happened. A step that ends a window is not recorded:
its own events may still be ahead of the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import torch

from dtrain.distributed.communicator import Communicator
from dtrain.distributed.logging import logger
from dtrain.distributed.progress import Phase, Progress
from dtrain.engine.outcome import StepOutcome
from dtrain.engine.parts.part import StepPart, StepUnderWay
from dtrain.engine.vote.decide import DecodedDecision

SLOW = 1.2
"""A rank is slow if it is busy for more than this times the median."""

PHASES = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)
"""The phases of a step."""

_SAMPLE_EVERY = 5  # steps; of the steps that a GPU times


@dataclass(frozen=True)
class BusyTimes:
    """The busy times of all ranks in a window of steps.

    Attributes:
        step: the last step of the window, counted from 1.
        num_steps: steps in the window that were timed.
        seconds: of each rank, over these steps.
        phase: in which the slowest rank lost most against the median; None unless that rank is slow.
    """

    step: int
    num_steps: int
    seconds: tuple[float, ...]
    phase: Phase | None = None

    @property
    def slowest_rank(self) -> int:
        """The rank that was busy longest."""
        return max(range(len(self.seconds)), key=self.seconds.__getitem__)

    @property
    def slowest_ms(self) -> float:
        """Milliseconds a step of the slowest rank."""
        return 1000 * max(self.seconds) / self.num_steps

    @property
    def median_ms(self) -> float:
        """Milliseconds a step of the median rank; of two ranks, the faster one."""
        return 1000 * median_low(self.seconds) / self.num_steps

    @property
    def spread_ms(self) -> float:
        """Milliseconds a step between the slowest and the fastest rank."""
        return self.slowest_ms - 1000 * min(self.seconds) / self.num_steps

    def __str__(self) -> str:
        where = f", most of the difference in {self.phase.name.lower()}" if self.phase is not None else ""
        return (
            f"rank {self.slowest_rank} was busy for {self.slowest_ms:.1f} ms a step up to step {self.step}, the median "
            f"rank for {self.median_ms:.1f} ms{where}"
        )


class BusyMeter(StepPart):
    """Measures this rank's busy time, and compares it with the others' at the end of each window.

    Args:
        comm: the ranks.
        phases: those of ``PHASES`` in which this engine sees every wait.

    Attributes:
        every: steps in a window; 0: nothing is compared.
        latest: the last comparison.
    """

    def __init__(self, comm: Communicator, phases: Sequence[Phase]) -> None:
        self.every = 20
        self.latest: BusyTimes | None = None
        self._comm = comm
        self._progress = comm.schedule.progress
        self._phases = phases
        self._events = _DeviceEvents(self._progress) if comm.device.type == "cuda" else None
        self._before = list(self._progress.busy_s) if self._events is None else [0.0] * len(Phase)
        self._num_steps = 0  # timed in this window
        self._window: list[float] = []  # by phase, of the last window that this rank has closed
        self._window_steps = 0
        self._warned: tuple[int, Phase | None] | None = None

    def before_update(self, step: StepUnderWay) -> None:
        step.busy_s = self._end(step.number)

    def finalized(self, outcome: StepOutcome, decision: DecodedDecision) -> None:
        self._compare(decision.step, decision.hosts.column("busy_s"))

    def end_step(self, step: StepUnderWay) -> None:
        if step.outcome is not None:
            self._begin(step.number + 1)

    def _end(self, step: int) -> float:
        """Ends the timing of ``step`` before its vote; returns the busy seconds of the window that it ends, else 0."""
        is_recorded = self._events is not None and self._events.stop()  # also if nothing is to be compared any more
        self._num_steps += self._events is None or is_recorded
        if not self.every or self._comm.world_size == 1:
            return 0.0
        if (step + 1) % self.every or not self._num_steps or is_recorded:  # as `every` may have changed in this step
            return 0.0
        now = list(self._progress.busy_s) if self._events is None else self._events.busy_s()
        self._window = [now[phase] - self._before[phase] for phase in self._phases]
        self._before, self._window_steps, self._num_steps = now, self._num_steps, 0
        return sum(self._window)

    def _begin(self, step: int) -> None:
        """Begins the timing of ``step`` after the update of the one before it."""
        if self._events is None or not self.every or self._comm.world_size == 1:
            return
        if step % _SAMPLE_EVERY == 2 and (step + 1) % self.every:
            self._events.start()

    def _compare(self, step: int, seconds: Sequence[float]) -> None:
        """Compares the busy ``seconds`` of all ranks in the window that ``step`` ended; all ranks call.

        They gather the phases if a rank is slow, which all of them see.
        """
        if not all(seconds):  # the step ended no window
            return
        times = BusyTimes(step + 1, self._window_steps, tuple(seconds))
        if times.slowest_ms > SLOW * times.median_ms:
            row = torch.tensor(self._window, dtype=torch.float64, device=self._comm.device)
            rows = self._comm.gather_rows(row, label="busy time by phase").tolist()
            excess = [own - median_low(column) for own, *column in zip(rows[times.slowest_rank], *rows, strict=True)]
            phase = self._phases[max(range(len(excess)), key=excess.__getitem__)]
            times = BusyTimes(times.step, times.num_steps, times.seconds, phase)
            if self._comm.rank == 0 and self._warned != (times.slowest_rank, phase):  # else it is known
                logger.warning("slow rank: %s", times)
            self._warned = (times.slowest_rank, phase)
        else:
            self._warned = None
        self.latest = times


class _DeviceEvents:
    """Busy time of a GPU in the steps that it records: [Note: busy time on a GPU]."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._busy_s = [0.0] * len(Phase)
        self._marks: list[tuple[Phase, bool, Any]] = []  # of the steps that are not read yet

    def start(self) -> None:
        self._progress.on_mark = self._mark
        self._mark(Phase.DATA, is_waiting=False)

    def stop(self) -> bool:
        """Ends the recording of a step; returns whether there was one."""
        if self._progress.on_mark is None:
            return False
        self._mark(Phase.UPDATE, is_waiting=True)  # until the next recorded step
        self._progress.on_mark = None
        return True

    def busy_s(self) -> list[float]:
        """Returns the busy seconds in each phase of all recorded steps."""
        for (phase, is_waiting, event), (_, _, following) in zip(self._marks, self._marks[1:], strict=False):
            if not is_waiting:
                self._busy_s[phase] += event.elapsed_time(following) / 1000
        del self._marks[:-1]
        return list(self._busy_s)

    def _mark(self, phase: Phase, *, is_waiting: bool) -> None:
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((phase, is_waiting, event))
