"""Measures steps of real ranks beside their simulation, and writes both as JSON.

``python -m tests.measure.simulation OUT.json`` takes 2 to 6 minutes. The simulation has the network from
``dtrain bench collectives`` on as many ranks, and the computation of a rank, which is measured while as many ranks
compute on the same cores and none of them communicates. Each process takes such a step and a real one in turn, so that
other work on the machine meets both.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dtrain.device import elapsed_ms
from dtrain.distributed.startup.setup import connect
from dtrain.planning.devices import find_device
from dtrain.planning.planned_run import PlannedRun
from dtrain.planning.time.measured import PlannedRank
from dtrain.planning.time.prediction import Assumptions, predict
from dtrain.train.session import Session
from tests.distributed.test_plans import configuration
from tests.helpers.ranks import run_ranks
from tests.measure.results import bench_collectives, load_now, printed, write

CASES: list[tuple[int, list[str]]] = [  # ranks and keys
    (1, ["engine.zero_stage=1"]),
    (2, ["engine.zero_stage=2"]),
    (2, ["engine.zero_stage=3", "launch.shared_memory=false"]),
    (4, ["engine.zero_stage=2"]),
    (4, ["engine.zero_stage=3", "launch.shared_memory=false"]),
    (4, ["engine.zero_stage=3", "engine.shard_size=2", "launch.shared_memory=false"]),
]
DEFAULTS = {
    "precision": "fp32",
    "model.num_layers": 4,
    "model.hidden_dim": 192,
    "model.num_heads": 6,
    "model.max_seq_len": 128,
    "train.micro_batch_size": 4,
    "train.global_batch_size": 16,
    "launch.device": "cpu",
}
_ROUNDS, _SKIPPED = 20, 3


def steps(rank: int, world: int, keys: list[str]) -> list[tuple[float, float]]:
    """Returns the milliseconds of steps without communication, and of the real steps after them."""
    config = configuration(world, keys, DEFAULTS)
    comm = connect(torch.device("cpu"), shared_memory=config.launch.shared_memory)
    run = PlannedRun.of(config, find_device("cpu", world), world)
    planned = PlannedRank(config, world, comm.device, run.transport)
    sessions = planned.session, Session.open(config, comm)
    found = []
    with planned.batches() as batches:
        for _ in range(_SKIPPED + _ROUNDS):
            batch, taken = next(batches), []
            for session in sessions:
                comm.barrier()
                taken.append(elapsed_ms(partial(session.step, batch), comm.device))
            found.append((taken[0], taken[1]))
    return found[_SKIPPED:]


def measure(ranks: int, keys: list[str], network: Path | None) -> dict[str, Any]:
    """Returns simulated and measured milliseconds of one case; a step takes as long as its slowest rank."""
    own = [*keys, f"launch.num_processes={ranks}"]
    rounds = zip(*run_ranks(ranks, steps, own, timeout=600.0), strict=True)
    alone, measured = zip(*(map(max, zip(*one, strict=True)) for one in rounds), strict=True)
    run = PlannedRun.of(configuration(ranks, own, DEFAULTS), find_device("cpu", ranks), ranks)
    assumed = Assumptions(str(network), step_ms=median(alone), spread=0.0)
    simulated = median(alone) if network is None else 1e3 * predict(run, assumed).step.seconds
    return {
        "ranks": ranks,
        "keys": keys,
        "rank_ms": median(alone),
        "simulated_ms": simulated,
        "measured_ms": median(measured),
        "ratio": round(simulated / median(measured), 3),
        "load": load_now(),
        "rank_ms_of_rounds": alone,
        "measured_ms_of_rounds": measured,
    }


def main() -> None:
    load = load_now()
    with tempfile.TemporaryDirectory() as folder:
        networks: dict[int, Path | None] = {ranks: bench_collectives(folder, ranks) for ranks in (2, 4)} | {1: None}
        cases = printed(measure(ranks, keys, networks[ranks]) for ranks, keys in CASES)
    write(load, defaults=DEFAULTS, cases=cases)


if __name__ == "__main__":
    main()
