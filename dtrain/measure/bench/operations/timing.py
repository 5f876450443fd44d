"""Times operations round by round in one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtrain.device import alternating_ms
from dtrain.measure.bench.records import MatrixTraffic, OperationResults, OperationTiming
from dtrain.measure.record import head


@dataclass(frozen=True)
class Operation:
    """A function to time; see :class:`OperationTiming` for what it must move and compute."""

    run: Callable[[], object]
    nbytes: int
    flops: int = 0


def time_rounds(operations: Mapping[str, Operation], rounds: int, device: torch.device) -> list[OperationTiming]:
    """Times every operation once a round, after one round that is not counted."""
    ms = alternating_ms({name: operation.run for name, operation in operations.items()}, device, rounds)
    return [OperationTiming(name, one.nbytes, ms[name], flops=one.flops) for name, one in operations.items()]


def measure_operations(
    suite: str,
    command: str,
    config: Any,
    description: str,
    measure: Callable[[], Iterable[OperationTiming]],
    *,
    baselines: list[str],
    reference: str | None = None,
    traffic: Sequence[MatrixTraffic] = (),
) -> Iterator[OperationResults]:
    """Yields the results so far, after each timing that ``measure`` returns."""
    results = OperationResults(
        suite=suite,
        **head(command, config),
        load=os.getloadavg()[0],
        description=description,
        reference=reference,
        baselines=baselines,
        timings=[],
        traffic=list(traffic),
    )
    for timing in measure():
        results.timings.append(timing)
        yield results
