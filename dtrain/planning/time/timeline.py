"""When a rank on a real device starts its collectives and waits for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dtrain.planning.record.transfers import Moment, RankTrace, Transfer


class Clock:
    """Marks moments: of the host on a CPU, of the current stream on a GPU, which the host does not wait for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Returns the seconds between two marks; on a GPU the host waits for the second."""
        if isinstance(start, float):
            return float(end) - start
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


class Timeline:
    """Keeps when a rank's transfers start and are waited for, from the last :meth:`restart` on."""

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._next = 0
        self.restart()

    def restart(self) -> None:
        self._transfers: dict[int, Transfer] = {}
        self._moments: list[tuple[Any, int, bool]] = []
        self._absences: list[tuple[Any, Any]] = []
        self._begin = self._clock.mark()

    def start(self, transfer: Transfer) -> int:
        """Returns the number of ``transfer``, which starts now."""
        number, self._next = self._next, self._next + 1
        self._transfers[number] = transfer
        self._moments.append((self._clock.mark(), number, False))
        return number

    def wait(self, number: int) -> None:
        """The rank waits for a transfer; one that was started before the last restart is not counted."""
        if number in self._transfers:
            self._moments.append((self._clock.mark(), number, True))

    def gathered(self, output: Tensor) -> None:
        """Notes nothing: only a plan of the memory tells full weights from others."""

    @contextmanager
    def absent(self) -> Iterator[None]:
        """What happens inside takes no time: it stands for the work of others."""
        begin = self._clock.mark()
        yield
        self._absences.append((begin, self._clock.mark()))

    def trace(self) -> RankTrace:
        """Returns what has happened since the last :meth:`restart`."""
        end, seconds = self._clock.mark(), self._seconds
        lost = 0.0
        absences = iter([(seconds(begin), seconds(stop)) for begin, stop in self._absences])
        absence = next(absences, None)
        moments = []
        for mark, number, is_wait in self._moments:
            now = seconds(mark)
            while absence is not None and absence[1] <= now:
                lost += absence[1] - absence[0]
                absence = next(absences, None)
            moments.append(Moment(now - lost, number, is_wait))
        while absence is not None:
            lost += absence[1] - absence[0]
            absence = next(absences, None)
        return RankTrace(seconds(end) - lost, moments, self._transfers)

    def _seconds(self, mark: Any) -> float:
        return self._clock.between(self._begin, mark)
