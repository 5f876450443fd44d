"""Times operations round by round in one process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dtrain.config.dump import config_to_dict
from dtrain.tools.bench.records import OperationResults, OperationTiming
from dtrain.tools.host import describe_host


@dataclass(frozen=True)
class Operation:
    """A function to time, and the bytes that it must move."""

    run: Callable[[], object]
    nbytes: int


def time_rounds(operations: Mapping[str, Operation], rounds: int, device: torch.device) -> list[OperationTiming]:
    """Times every operation once a round, after one round that is not counted."""
    ms: dict[str, list[float]] = {name: [] for name in operations}
    for number in range(rounds + 1):
        for name, operation in operations.items():
            elapsed = _time(operation, device)
            if number:
                ms[name].append(elapsed)
    return [OperationTiming(name, operation.nbytes, ms[name]) for name, operation in operations.items()]


def _time(operation: Operation, device: torch.device) -> float:
    start = time.perf_counter()
    operation.run()
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
    """Returns what ``measure`` timed, with load, date, machine and command."""
    return OperationResults(
        suite=suite,
        command=command,
        date=time.strftime("%Y-%m-%dT%H:%M:%S"),
        host=describe_host(),
        config=config_to_dict(config),
        load=os.getloadavg()[0],
        description=description,
        reference=reference,
        baselines=baselines,
        timings=measure(),
    )


def plural(count: int, noun: str) -> str:
    """Returns ``1 rank``, ``2 ranks``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
