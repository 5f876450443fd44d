"""Runs a suite of operations on several ranks; the timings are rank 0's."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from dtrain.config.dump import from_plain
from dtrain.config.tool_schema import CheckpointBenchConfig, CollectivesBenchConfig
from dtrain.measure.bench.records import OperationTiming
from dtrain.measure.ranks import run_ranks
from dtrain.measure.worker import Rank
from dtrain.tools.tables import plural


def describe(template: str, bench: CheckpointBenchConfig | CollectivesBenchConfig, device: str) -> str:
    """Fills ``{ranks}``, ``{threads}`` and ``{device}`` into the description of a suite."""
    ranks, threads = plural(bench.ranks, "rank"), plural(bench.threads_per_rank, "thread")
    return template.format(ranks=ranks, device=device, threads=threads)


def time_on_ranks(
    suite: str, bench: CheckpointBenchConfig | CollectivesBenchConfig, folder: Path
) -> list[OperationTiming]:
    """Runs ``time_sizes`` of the suite's module on ``bench.ranks`` processes, whose job is ``bench`` and ``folder``.

    Raises:
        RankError: a rank failed.
    """
    job = {"bench": asdict(bench), "folder": str(folder)}
    rank = Rank(job, ranks=bench.ranks, device=bench.device, threads=bench.threads_per_rank)
    function = f"dtrain.measure.bench.operations.{suite}:time_sizes"
    return [from_plain(OperationTiming, timing) for timing in run_ranks(function, rank, folder=folder / "ranks")[0]]
