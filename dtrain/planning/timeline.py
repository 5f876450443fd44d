"""When a rank starts its collectives and waits for them, and what the waits take if the collectives take time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

WORLD, SHARD, REPLICATE = "all ranks", "dp_shard", "dp_replicate"
"""Axes of the mesh, by the names in tables."""


@dataclass(frozen=True)
class Transfer:
    """A collective of ``world_size`` ranks, in which a rank receives ``nbytes``.

    ``label`` is its name in messages, ``axis`` one of :data:`WORLD`, :data:`SHARD`, :data:`REPLICATE`, and ``stride``
    the distance of its ranks among all ranks.
    """

    op: str
    nbytes: int
    world_size: int
    label: str = ""
    axis: str = WORLD
    stride: int = 1


@dataclass(frozen=True)
class Moment:
    """What happens ``seconds`` after the beginning: transfer number ``transfer`` starts, or the rank waits for it."""

    seconds: float
    transfer: int
    is_wait: bool


@dataclass(frozen=True)
class RankTrace:
    """What one rank does in some steps, if every transfer takes no time.

    Attributes:
        seconds: the whole.
        moments: in their order.
        transfers: by number.
    """

    seconds: float
    moments: Sequence[Moment]
    transfers: Mapping[int, Transfer]


@dataclass(frozen=True)
class Communication:
    """Seconds of the transfers of a trace: for which the rank waits, and which it does not notice."""

    waited: float = 0.0
    hidden: float = 0.0


def communicate(trace: RankTrace, seconds_of: Callable[[Transfer], float], *, overlaps: bool) -> Communication:
    """Returns what the transfers of ``trace`` take.

    They run one after the other, each from when it is started. Without ``overlaps`` nothing happens before the rank
    waits, because the rank itself moves the bytes.
    """
    delay = free = total = 0.0  # of the rank; when the network is free again
    done: dict[int, float] = {}
    for moment in trace.moments:
        now = moment.seconds + delay
        if moment.is_wait == overlaps:
            delay += max(0.0, done.pop(moment.transfer, now) - now) if overlaps else 0.0
            continue
        taken = seconds_of(trace.transfers[moment.transfer])
        total += taken
        if overlaps:
            done[moment.transfer] = free = max(now, free) + taken
        else:
            delay += taken
    return Communication(delay, max(0.0, total - delay))


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

    def __init__(self, device: torch.device, clock: Clock | None = None) -> None:
        self._clock = clock or Clock(device)
        self.restart()

    def restart(self) -> None:
        self._transfers: dict[int, Transfer] = {}
        self._moments: list[tuple[Any, int, bool]] = []
        self._absences: list[tuple[Any, Any]] = []
        self._begin = self._clock.mark()

    def start(self, transfer: Transfer) -> int:
        """Returns the number of ``transfer``, which starts now."""
        number = len(self._transfers)
        self._transfers[number] = transfer
        self._moments.append((self._clock.mark(), number, False))
        return number

    def wait(self, number: int) -> None:
        """The rank waits for a transfer; one that was started before the last restart is not counted."""
        if number in self._transfers:
            self._moments.append((self._clock.mark(), number, True))

    @property
    def transfers(self) -> list[Transfer]:
        """Transfers since the last :meth:`restart`, in their order."""
        return list(self._transfers.values())

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
