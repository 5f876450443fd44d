"""Stopwatches around the parts of the vote, inside the real steps of the measured process."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from dtrain.engine.interface import Engine


class Stopwatch:
    """Times the calls of ``owner``'s method ``name`` from outside, so that the method needs no code for it.

    On a GPU the time passes between two events on the current stream. It includes the gaps in which the device waits
    for the host or for other ranks.

    Args:
        within: count only calls made inside the method that this stopwatch times; None: all.
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
        """Returns the milliseconds spent in the method since the last call; the device must have finished."""
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
    """Puts stopwatches around the parts of ``engine``'s vote; returns them by name."""
    vote = Stopwatch(engine, "_vote", engine.device)
    return {
        "vote": vote,
        "norm": Stopwatch(engine, "_squares", engine.device, vote),
        # only within the vote: after a skipped step the ranks also gather records about the culprit
        "all-gather": Stopwatch(engine.comm, "gather_rows", engine.device, vote),
    }
