"""What the vote takes inside a real step: its parts timed in the measured process, and their table."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from dtrain.tools.bench.records import Entry
from dtrain.tools.bench.tables import spread
from dtrain.tools.tables import Column, markdown_table

if TYPE_CHECKING:
    from dtrain.engine.interface import Engine

_ABOUT = (
    "The vote: norm, record, all-gather, decision. The norm is one pass over this rank's main grads, which clipping "
    "needs as well. Median (least to most) over all timed steps. In the all-gather a rank waits for the one that comes "
    "last: 'slowest' is the rank that took longest in a step, waiting included; 'fastest' the one that took least, the "
    "cost where all come at once. Shares are of the step on its slowest rank."
)


class Stopwatch:
    """Puts a clock around ``owner``'s method ``name``, so that the method itself needs none.

    On a GPU the time passes between two events on the stream in use: what the device does, the gaps included in which
    it waits for the host or for other ranks.

    Args:
        within: only calls made inside the method that this one times are counted; None: all.
    """

    def __init__(self, owner: object, name: str, device: torch.device, within: Stopwatch | None = None) -> None:
        self.is_running = False
        self._on_gpu = device.type == "cuda"
        self._calls: list[tuple[Any, Any]] = []
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if within is not None and not within.is_running:
                return method(*args, **kwargs)
            self.is_running, start = True, self._now()
            result = method(*args, **kwargs)
            self._calls.append((start, self._now()))
            self.is_running = False
            return result

        setattr(owner, name, timed)

    def take(self) -> float:
        """Milliseconds in the method since the last take, on a device that has finished."""
        assert self._calls, "the method that is timed was not called"
        elapsed = [start.elapsed_time(end) if self._on_gpu else 1000 * (end - start) for start, end in self._calls]
        self._calls.clear()
        return float(sum(elapsed))

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def time_vote(engine: Engine) -> dict[str, Stopwatch]:
    """Stopwatches around the parts of ``engine``'s vote, by name."""
    vote = Stopwatch(engine, "_vote", engine.device)
    return {
        "vote": vote,
        "norm": Stopwatch(engine, "_squares", engine.device, vote),
        # after a skip the ranks also gather what they know of the culprit
        "all-gather": Stopwatch(engine.comm, "gather_rows", engine.device, vote),
    }


@dataclass(frozen=True)
class _Part:
    """One row of the table.

    Attributes:
        ms: of each timed step, on each rank.
        step_ms: of each timed step, on its slowest rank.
    """

    contender: str
    name: str
    ms: list[tuple[float, ...]]
    step_ms: list[float]


def describe_votes(entries: Sequence[Entry]) -> list[str]:
    """The table of the vote's parts, and what its columns mean."""

    def by_rank(part: _Part) -> str:
        return ", ".join(f"{median(times):.3f}" for times in zip(*part.ms, strict=True))

    def share(part: _Part, times: list[float]) -> str:
        return f"{median(own / step for own, step in zip(times, part.step_ms, strict=True)):.2%}"

    columns: list[Column[_Part]] = [
        ("contender", lambda part: part.contender),
        ("part", lambda part: part.name),
        ("ms by rank", by_rank),
        ("slowest ms", lambda part: spread([max(ranks) for ranks in part.ms], 3)),
        ("slowest / step", lambda part: share(part, [max(ranks) for ranks in part.ms])),
        ("fastest ms", lambda part: spread([min(ranks) for ranks in part.ms], 3)),
        ("fastest / step", lambda part: share(part, [min(ranks) for ranks in part.ms])),
    ]
    return [markdown_table(columns, [part for entry in entries for part in _parts(entry)]), _ABOUT]


def _parts(entry: Entry) -> list[_Part]:
    def timed(name: str) -> list[tuple[float, ...]]:
        return [ranks for turn in entry.turns for ranks in zip(*turn.parts_ms[name], strict=True)]

    vote, norm, gather = timed("vote"), timed("norm"), timed("all-gather")
    without_norm = _difference(vote, norm)
    parts = {
        "vote": vote,
        "norm": norm,
        "vote without norm": without_norm,
        "all-gather": gather,
        "record, decision": _difference(without_norm, gather),
    }
    steps = [value for turn in entry.turns for value in turn.step_ms]
    return [_Part(entry.contender.name, name, ms, steps) for name, ms in parts.items()]


def _difference(whole: list[tuple[float, ...]], part: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
    return [tuple(a - b for a, b in zip(*pair, strict=True)) for pair in zip(whole, part, strict=True)]
