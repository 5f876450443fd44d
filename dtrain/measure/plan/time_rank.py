"""Measures one rank of a planned job; as a module it is the process that does so."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dtrain.config.dump import config_from_dict, from_plain
from dtrain.distributed.startup.setup import choose_device, connect_by_file, disconnect
from dtrain.distributed.transport.choose import make_communicator
from dtrain.measure.plan.amdahl import Item, profile_items, record, speedups
from dtrain.planning.network import Network
from dtrain.tools.processes import open_result, read_job
from dtrain.train.step_time import PlannedRank, StepTime


@dataclass(frozen=True)
class TimedRank:
    """What to measure.

    Attributes:
        config: of the run.
        num_ranks: of the job.
        transport: between them.
        network: results of ``dtrain bench collectives``; None if the network is unknown.
        process: number of this process among ``num_processes``, which run at the same time.
        store: file where they meet.
        threads: of this process.
        budget_s: seconds for the steps, and twice as many for the products.
    """

    config: dict[str, Any]
    num_ranks: int
    transport: str
    network: str | None
    process: int
    num_processes: int
    store: str
    threads: int
    budget_s: float


@dataclass(frozen=True)
class RankTime:
    """Times of one rank.

    Attributes:
        step: without profiler.
        mfu: None if unknown.
        items: operations of a step, longest first.
        speedups: of the products, by format.
        precision: name of the policy.
    """

    step: StepTime
    mfu: float | None
    items: list[Item]
    speedups: dict[str, float]
    precision: str


def measure(job: TimedRank) -> RankTime:
    """Measures a rank in this process."""
    torch.set_num_threads(job.threads)
    config = config_from_dict(job.config)
    device = choose_device(config.launch.device, job.process)
    connect_by_file(job.store, job.process, job.num_processes, device)
    processes = make_communicator(dist.group.WORLD if job.num_processes > 1 else None, device, shared_memory=False)
    rank = PlannedRank(config, job.num_ranks, device, job.transport)
    network = None if job.network is None else Network.read(Path(job.network), job.transport)
    step = rank.time(network, job.budget_s, processes.barrier)
    items = profile_items(rank)
    faster = speedups(record(rank), device, 2 * job.budget_s)
    processes.barrier()
    return RankTime(step, rank.utilization(step.ms / 1e3), items, faster, rank.engine.policy.name)


def _main() -> None:
    job = from_plain(TimedRank, json.loads(read_job()))
    results = open_result()
    json.dump(asdict(measure(job)), results)
    results.close()
    disconnect()


if __name__ == "__main__":
    _main()
