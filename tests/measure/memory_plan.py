"""Measures the growth of rank 0's resident set beside its plan, and writes both as JSON.

``python -m tests.measure.memory_plan OUT.json`` takes some minutes.
"""

from __future__ import annotations

import gc
from typing import Any

import torch

from dtrain.config.schema import RunConfig
from dtrain.data import load_dataset
from dtrain.device import PeakMemory
from dtrain.distributed.startup.setup import connect
from dtrain.planning.devices import find_device
from dtrain.planning.memory.plan import MemoryPlan, plan_memory
from dtrain.planning.planned_run import PlannedRun
from tests.distributed.test_plans import CASES, TINY, build, configuration
from tests.helpers.ranks import run_ranks
from tests.measure.results import load_now, printed, write

LARGE = {
    "model.num_layers": 6,
    "model.hidden_dim": 512,
    "model.num_heads": 8,
    "model.max_seq_len": 512,
    "train.micro_batch_size": 8,
    "train.save_every": 0,  # the loop below does not save
}

_SMALL = "train.micro_batch_size=4"
_RECOMPUTED = "model.factory=tests.helpers.planned_models:Recomputed"
FITTED: list[tuple[int, list[str]]] = [  # by which the number of small objects was chosen (planning/memory/heap.py)
    (1, ["precision=fp32", "optim=lion", "model.num_layers=4", "model.hidden_dim=384", "model.num_heads=6"]),
    (1, ["precision=bf16", _RECOMPUTED, "model.num_layers=4", "model.hidden_dim=768", "model.num_heads=12", _SMALL]),
    (1, ["precision=fp32", _RECOMPUTED, _SMALL]),
    (2, ["precision=bf16", "engine.zero_stage=1", "train.global_batch_size=32"]),
    (2, ["precision=fp32", "engine.zero_stage=2", _SMALL, "model.max_seq_len=256"]),
    (1, ["precision=bf16", "model.factory=tests.helpers.planned_models:Convolutions"]),
    (2, ["precision=fp8", "engine.zero_stage=3", _SMALL]),
    (1, ["precision=bf16", "model=gpt2-124m", "model.max_seq_len=256", _SMALL]),
    (4, ["precision=fp32", "engine.zero_stage=3", "train.micro_batch_size=2", "model.max_seq_len=128"]),
]


def expected(plan: MemoryPlan) -> int:
    """Returns the middle of the plan's band, without what a first step loads: libraries, 64 MiB of kernels."""
    return plan.tensors + round(plan.tensors * sum(plan.fragments) / 2) + plan.largest


def _steps(config: RunConfig, comm: Any, num_steps: int) -> None:
    session, batch = build(config, comm)
    for _ in range(num_steps):
        session.step(batch)


def resident(rank: int, world: int, keys: list[str]) -> int | None:
    """Returns the growth of this rank's resident set from before the model is built to its peak in three steps."""
    config, sizes = configuration(world, keys, LARGE), tuple(LARGE)
    comm = connect(torch.device("cpu"), shared_memory=config.launch.shared_memory)
    small = [key for key in keys if not key.startswith(sizes)]
    _steps(configuration(world, small, TINY), comm, 2)  # loads the libraries
    load_dataset(config.data, config.model.max_seq_len)
    gc.collect()
    before = comm.foreign_nbytes()
    meter = PeakMemory(comm.device)
    _steps(config, comm, 3)
    return meter.total(comm.foreign_nbytes() - before)


def measure(ranks: int, keys: list[str]) -> dict[str, Any]:
    """Returns planned and measured bytes of one case."""
    plan = plan_memory(PlannedRun.of(configuration(ranks, keys, LARGE), find_device("cpu", ranks), ranks))
    measured = run_ranks(ranks, resident, keys, timeout=900.0)[0]
    sizes = {"tensors": plan.tensors, "expected": expected(plan), "resident": measured}
    return {"ranks": ranks, "keys": keys, **sizes, "ratio": round(expected(plan) / measured, 3)}


def main() -> None:
    load = load_now()
    cases, fitted = (printed(measure(*case) for case in cases) for cases in (CASES, FITTED))
    write(load, defaults=LARGE, cases=cases, fitted=fitted)


if __name__ == "__main__":
    main()
