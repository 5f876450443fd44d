"""Runs a suite of operations on several ranks, each a process of the suite's module; rank 0 writes the timings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from dtrain.config.dump import from_plain
from dtrain.config.tool_schema import CheckpointBenchConfig, CollectivesBenchConfig
from dtrain.distributed.startup.setup import choose_device, connect_by_file, disconnect
from dtrain.measure.bench.records import OperationTiming
from dtrain.tools.processes import open_result, read_job, run_ranks
from dtrain.tools.tables import plural

Bench = TypeVar("Bench", CheckpointBenchConfig, CollectivesBenchConfig)


@dataclass(frozen=True)
class OperationJob:
    """The job of one rank; ``folder`` is the same on all ranks."""

    rank: int
    folder: str
    bench: dict[str, Any]


def describe(template: str, bench: Bench, device: str) -> str:
    """Fills ``{ranks}``, ``{threads}`` and ``{device}`` into the description of a suite."""
    ranks, threads = plural(bench.ranks, "rank"), plural(bench.threads_per_rank, "thread")
    return template.format(ranks=ranks, device=device, threads=threads)


def time_on_ranks(suite: str, bench: Bench, folder: Path) -> list[OperationTiming]:
    """Runs the suite's module on ``bench.ranks`` processes.

    Raises:
        RankError: a rank failed.
    """
    results = run_ranks(
        f"dtrain.measure.bench.operations.{suite}",
        [json.dumps(asdict(OperationJob(rank, str(folder), asdict(bench)))) for rank in range(bench.ranks)],
        threads=bench.threads_per_rank,
        folder=folder / "ranks",
    )
    return [from_plain(OperationTiming, timing) for timing in json.loads(results[0])]


def run_rank(kind: type[Bench], measure: Callable[[Bench, torch.device, Path], Iterable[OperationTiming]]) -> None:
    """Runs one rank; ``measure`` gets the job's configuration, device and folder, with the process group made."""
    job = from_plain(OperationJob, json.loads(read_job()))
    results = open_result()
    bench = from_plain(kind, job.bench)
    torch.set_num_threads(bench.threads_per_rank)
    device = choose_device(bench.device, job.rank)
    connect_by_file(str(Path(job.folder, "store")), job.rank, bench.ranks, device)
    timings = [asdict(timing) for timing in measure(bench, device, Path(job.folder))]
    if job.rank == 0:
        json.dump(timings, results)
    results.close()
    disconnect()
