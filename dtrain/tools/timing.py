"""Times operations: by events of the device on a GPU, by the clock on a CPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

_LEAST_MS = {"cuda": 2.0, "cpu": 5.0}  # shorter intervals measure the launch and the clock


def time_ms(run: Callable[[], object], device: torch.device, rounds: int = 10, budget_s: float = 1.0) -> list[float]:
    """Returns the milliseconds of one call of ``run`` in each of ``rounds`` rounds, after two calls to warm up.

    A round calls it several times if it is short. There are fewer rounds, at least three, if they would take longer
    than ``budget_s``.
    """
    run()
    first = elapsed_ms(run, device, 1)
    calls = max(1, math.ceil(_LEAST_MS[device.type] / max(first, 1e-3)))
    rounds = min(rounds, max(3, int(1000 * budget_s / (first * calls))))
    return [elapsed_ms(run, device, calls) for _ in range(rounds)]


def elapsed_ms(run: Callable[[], object], device: torch.device, calls: int) -> float:
    """Returns the milliseconds of one call of ``run``, the mean of ``calls`` of them."""
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        return 1000 * (time.perf_counter() - begin) / calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / calls
