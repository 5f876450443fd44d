"""Times operations round by round, in one process or on several ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dtrain.config.dump import from_plain
from dtrain.config.tool_schema import CheckpointBenchConfig, CollectivesBenchConfig
from dtrain.device import alternating_ms
from dtrain.measure.bench.records import MatrixTraffic, OperationResults, OperationTiming
from dtrain.measure.ranks import run_ranks
from dtrain.measure.record import head
from dtrain.measure.worker import Rank
from dtrain.tools.tables import plural


@dataclass(frozen=True)
class Operation:
    """A function to time; see ``OperationTiming`` for what it must move and compute."""

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


def describe(template: str, bench: CheckpointBenchConfig | CollectivesBenchConfig, device: str) -> str:
    """Fills ``{ranks}``, ``{threads}`` and ``{device}`` into the description of a suite."""
    ranks, threads = plural(bench.ranks, "rank"), plural(bench.threads_per_rank, "thread")
    return template.format(ranks=ranks, device=device, threads=threads)


def time_on_ranks(
    suite: str, bench: CheckpointBenchConfig | CollectivesBenchConfig, folder: Path
) -> list[OperationTiming]:
    """Runs ``time_sizes`` of the suite's module on ``bench.ranks`` processes; the timings are rank 0's.

    Their job is ``bench`` and ``folder``.

    Raises:
        RankError: a rank failed.
    """
    job = {"bench": asdict(bench), "folder": str(folder)}
    rank = Rank(job, ranks=bench.ranks, device=bench.device, threads=bench.threads_per_rank)
    function = f"dtrain.measure.bench.operations.{suite}:time_sizes"
    return [from_plain(OperationTiming, timing) for timing in run_ranks(function, rank, folder=folder / "ranks")[0]]
