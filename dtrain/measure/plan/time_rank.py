"""Measures one rank of a planned job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from dtrain.config.dump import config_from_dict
from dtrain.distributed.transport.choose import make_communicator
from dtrain.measure.plan.amdahl import Item, profile_items, record, speedups
from dtrain.measure.worker import Rank
from dtrain.planning.network import Network
from dtrain.train.step_time import PlannedRank, StepTime


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


def measure(rank: Rank) -> RankTime:
    """Measures a rank of the planned job beside the others that share this host.

    The job is ``config``, ``ranks`` of the run, their ``transport``, the file ``network`` or None, and ``budget_s``:
    seconds for the steps, and twice as many for the products.
    """
    job, device = rank.job, rank.torch_device()
    processes = make_communicator(dist.group.WORLD if rank.ranks > 1 else None, device, shared_memory=False)
    planned = PlannedRank(config_from_dict(job["config"]), job["ranks"], device, job["transport"])
    network = None if job["network"] is None else Network.read(Path(job["network"]), job["transport"])
    step = planned.time(network, job["budget_s"], processes.barrier)
    items = profile_items(planned)
    faster = speedups(record(planned), device, 2 * job["budget_s"])
    processes.barrier()
    return RankTime(step, planned.utilization(step.ms / 1e3), items, faster, planned.engine.policy.name)
