"""Measures the growth of rank 0's resident set beside its plan, and writes both as JSON.

``python -m tests.distributed.measure_memory_plan OUT.json`` takes some minutes.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dtrain.config.schema import RunConfig
from dtrain.data import load_dataset
from dtrain.distributed.setup import connect
from dtrain.planning.devices import find_device
from dtrain.telemetry.host import describe_host
from dtrain.telemetry.memory import PeakMeter
from dtrain.train.memory.plan import MemoryPlan, plan_memory
from dtrain.train.planned import PlannedRun
from tests.distributed.test_memory_plan import CASES, TINY, build, configuration
from tests.helpers.ranks import run_ranks

LARGE = {
    "model.num_layers": 6,
    "model.hidden_dim": 512,
    "model.num_heads": 8,
    "model.max_seq_len": 512,
    "train.micro_batch_size": 8,
    "train.save_every": 0,  # the loop below does not save
}


def expected(plan: MemoryPlan) -> int:
    """Returns the middle of the plan's band, without what a first step loads: libraries, 64 MiB of kernels."""
    low, high = plan.step.fragments
    return plan.tensors + (low + high) // 2 + plan.step.largest


def _steps(config: RunConfig, comm: Any, num_steps: int) -> None:
    engine, batch, count = build(config, comm)
    for _ in range(num_steps):
        for micro in engine.accumulate([batch] * count):
            engine.backward(engine(**micro))
        engine.step()


def resident(rank: int, world: int, keys: list[str]) -> int | None:
    """Returns the growth of this rank's resident set from before the model is built to its peak in three steps."""
    config, sizes = configuration(world, keys, LARGE), tuple(LARGE)
    comm = connect(torch.device("cpu"), shared_memory=config.launch.shared_memory)
    small = [key for key in keys if not key.startswith(sizes)]
    _steps(configuration(world, small, TINY), comm, 2)  # loads the libraries
    load_dataset(config.data, config.model.max_seq_len)
    gc.collect()
    before = comm.foreign_nbytes()
    meter = PeakMeter(comm.device)
    _steps(config, comm, 3)
    return meter.peak(comm.foreign_nbytes() - before)


def measure(ranks: int, keys: list[str]) -> dict[str, Any]:
    """Returns planned and measured bytes of one case."""
    plan = plan_memory(PlannedRun.of(configuration(ranks, keys, LARGE), find_device("cpu", ranks), ranks))
    measured = run_ranks(ranks, resident, keys, timeout=900.0)[0]
    sizes = {"tensors": plan.tensors, "expected": expected(plan), "resident": measured}
    return {"ranks": ranks, "keys": keys, **sizes, "ratio": round(expected(plan) / measured, 3)}


def main() -> None:
    cases = []
    for ranks, keys in CASES:
        cases.append(measure(ranks, keys))
        print(cases[-1], flush=True)
    result = {"host": asdict(describe_host()), "defaults": LARGE, "cases": cases}
    Path(sys.argv[1]).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
