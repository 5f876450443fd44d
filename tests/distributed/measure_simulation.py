"""Measures steps of real runs on 1, 2 and 4 ranks beside their simulation, and writes both as JSON.

``python -m tests.distributed.measure_simulation OUT.json`` takes some 10 minutes on two quiet cores. The simulation has
the network from ``dtrain bench collectives`` on as many ranks, and the computation of a rank, which is measured while
as many ranks compute on the same cores and none of them communicates. Both sides are measured in turn in some rounds,
so that other work on the machine meets both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from dtrain.planning.devices import find_device
from dtrain.planning.network import Network
from dtrain.telemetry.host import describe_host
from dtrain.tools.plan.time import measure_time
from dtrain.tools.simulate.step import simulate_step, trace_run
from dtrain.train.planned import PlannedRun
from tests.distributed.measure_step_time import trained
from tests.distributed.test_memory_plan import configuration

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
    "launch.threads_per_rank": 1,
}
_ROUNDS, _BUDGET_S = 3, 3.0


def simulated(ranks: int, keys: list[str], network: Path | None) -> tuple[float, float]:
    """Returns the milliseconds of a rank's computation, measured, and of its step, simulated."""
    run = PlannedRun.of(configuration(ranks, keys, {}), find_device("cpu", ranks), ranks)
    busy = median(measure_time(run, None, _BUDGET_S).step.busy_ms)
    traced = trace_run(run, 1.0, busy)
    if network is None:
        return busy, 1e3 * simulate_step(traced, lambda _: 0.0).seconds
    return busy, 1e3 * simulate_step(traced, Network.read(network, run.transport).seconds).seconds


def measured_network(folder: str, ranks: int) -> Path | None:
    """Returns the results of ``dtrain bench collectives`` on ``ranks`` ranks; a single rank has no network."""
    if ranks == 1:
        return None
    path = Path(folder, f"network-{ranks}.json")
    command = [sys.executable, "-m", "dtrain", "bench", "collectives", f"bench.out={path}", f"bench.ranks={ranks}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return path


def measure(ranks: int, keys: list[str], network: Path | None) -> dict[str, float]:
    """Returns simulated and measured milliseconds of one case."""
    own = [*keys, *(f"{key}={value}" for key, value in DEFAULTS.items())]
    busy, step = simulated(ranks, [*own, f"launch.num_processes={ranks}"], network)
    taken = trained(ranks, own)
    return {"rank_ms": busy, "simulated_ms": step, "measured_ms": taken, "load": os.getloadavg()[0]}


def summary(number: int, rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Returns the medians of case ``number``, and their ratio."""
    ranks, keys = CASES[number]
    medians = {name: median(one[name] for one in rounds) for name in ("rank_ms", "simulated_ms", "measured_ms")}
    ratio = round(medians["simulated_ms"] / medians["measured_ms"], 3)
    return {"ranks": ranks, "keys": keys, **medians, "ratio": ratio, "rounds": rounds}


def main() -> None:
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    rounds: list[list[dict[str, float]]] = [[] for _ in CASES]
    for _ in range(_ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            networks = {ranks: measured_network(folder, ranks) for ranks in {ranks for ranks, _ in CASES}}
            for own, (ranks, keys) in zip(rounds, CASES, strict=True):
                own.append(measure(ranks, keys, networks[ranks]))
                print(ranks, *keys, own[-1], flush=True)
        cases = [summary(number, own) for number, own in enumerate(rounds)]
        result = {"host": asdict(describe_host()), "defaults": DEFAULTS, "cases": cases}
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
