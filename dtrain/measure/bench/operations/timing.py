"""Times operations round by round in one process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dtrain.measure.bench.records import OperationResults, OperationTiming, run_header


@dataclass(frozen=True)
class Operation:
    """A function to time; see :class:`OperationTiming` for what it must move and compute."""

    run: Callable[[], object]
    nbytes: int
    flops: int = 0


def time_rounds(operations: Mapping[str, Operation], rounds: int, device: torch.device) -> list[OperationTiming]:
    """Times every operation once a round, after one round that is not counted."""
    ms: dict[str, list[float]] = {name: [] for name in operations}
    for number in range(rounds + 1):
        for name, operation in operations.items():
            elapsed = elapsed_ms(operation.run, device)
            if number:
                ms[name].append(elapsed)
    return [OperationTiming(name, one.nbytes, ms[name], flops=one.flops) for name, one in operations.items()]


def elapsed_ms(run: Callable[[], object], device: torch.device) -> float:
    """Returns the wall time of ``run`` until the device has finished it."""
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1000 * (time.perf_counter() - start)


def measure_operations(
    suite: str,
    command: str,
    config: Any,
    description: str,
    measure: Callable[[], list[OperationTiming]],
    *,
    baselines: list[str],
    reference: str | None = None,
) -> OperationResults:
    return OperationResults(
        **run_header(suite, command, config),
        load=os.getloadavg()[0],
        description=description,
        reference=reference,
        baselines=baselines,
        timings=measure(),
    )
