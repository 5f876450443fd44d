"""Times parts of real steps from outside, so that the engine needs no code for it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any

import torch

from dtrain.train.session import MicroBatch, StepWatch


class PartTimes(StepWatch):
    """Times parts of a step. What a part calls of another part counts for that one alone.

    Args:
        device: a GPU: the time passes between two events on the current stream, gaps included in which the device waits
            for the host or for other ranks; else by ``clock``.
        clock: in seconds.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._on_gpu, self._clock = device.type == "cuda", clock
        self._part = ""
        self._changes: list[tuple[str, Any]] = []  # a part that begins or goes on, and when

    @contextmanager
    def inside(self, part: str) -> Iterator[None]:
        outer = self._part
        self._change(part)
        try:
            yield
        finally:
            self._change(outer)

    def _change(self, part: str) -> None:
        self._part = part
        if not self._on_gpu:
            self._changes.append((part, self._clock()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._changes.append((part, event))

    def watch(self, owner: object, name: str, part: str, *, within: str | None = None) -> None:
        """Times the method ``name`` of ``owner``; with ``within`` only what that part calls."""
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if within not in (None, self._part):
                return method(*args, **kwargs)
            with self.inside(part):
                return method(*args, **kwargs)

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        """Returns the milliseconds of each part since the last call; the device must have finished."""
        ms: Counter[str] = Counter()
        for (part, start), (_, end) in pairwise(self._changes):
            ms[part] += start.elapsed_time(end) if self._on_gpu else 1000 * (end - start)
        self._changes.clear()
        del ms[""]
        return dict(ms)

    def forward(self, micro: MicroBatch) -> AbstractContextManager[object]:
        return self.inside("forward")

    def backward(self, micro: MicroBatch, output: Any, weight: float) -> AbstractContextManager[object]:
        return self.inside("backward")

    def update(self) -> AbstractContextManager[object]:
        return self.inside("update")
