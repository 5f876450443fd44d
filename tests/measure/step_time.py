"""Measures the steps of real runs beside their planned time, and writes both as JSON.

``python -m tests.measure.step_time OUT.json`` takes some 20 minutes on two quiet cores.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from dtrain.planning.devices import find_device
from dtrain.planning.planned_run import PlannedRun
from dtrain.planning.time.measured import expected
from dtrain.planning.time.prediction import Assumptions
from dtrain.planning.time.show import RankTime, measure_time, with_ranks
from dtrain.telemetry.metrics import read_metrics
from tests.distributed.test_plans import configuration
from tests.measure.results import bench_collectives, load_now, printed, write

CASES: list[tuple[int, list[str]]] = [  # ranks and keys
    (1, ["precision=fp32", "engine.zero_stage=0"]),
    (1, ["precision=bf16", "model.dropout=0.1", "train.micro_batch_size=4"]),
    (1, ["precision=fp32", "optim=lion", "model.num_layers=8", "model.hidden_dim=192", "model.num_heads=6"]),
    (1, ["precision=fp8", "model.num_kv_heads=2", "train.micro_batch_size=2", "train.global_batch_size=4"]),
    (1, ["precision=fp32", "model=gpt2-124m", "model.max_seq_len=64", "train.micro_batch_size=1"]),
    (1, ["precision=bf16", "model.hidden_dim=512", "model.num_heads=8", "ema.decay=0.99"]),
    (2, ["precision=fp32", "engine.zero_stage=1"]),
    (2, ["precision=bf16", "engine.zero_stage=2", "optim=adamw-bf16"]),
    (2, ["precision=fp32", "engine.zero_stage=3", "model.hidden_dim=512", "model.num_heads=8"]),
    (2, ["precision=fp32", "engine.zero_stage=2", "launch.shared_memory=false"]),
    (2, ["precision=fp32", "engine.zero_stage=3", "launch.shared_memory=false", "model.hidden_dim=512"]),
    (2, ["precision=fp32", "engine.zero_stage=2", "engine.reproducible=true", "train.micro_batch_size=2"]),
]
DEFAULTS = {
    "model.num_layers": 4,
    "model.hidden_dim": 256,
    "model.num_heads": 4,
    "model.max_seq_len": 256,
    "train.micro_batch_size": 4,
    "train.global_batch_size": 16,
    "launch.device": "cpu",
}
_ROUNDS, _BUDGET_S = 2, 5.0
_STEPS, _SKIPPED = 14, 3
_NOT_TIMED = ["train.save_every=0", "train.eval_every=0", "train.sample_tokens=0", "report=false"]


def planned(ranks: int, keys: list[str], network: Path) -> tuple[RankTime, float]:
    """Returns the measured times of a rank, and the planned milliseconds of a step."""
    config = configuration(ranks, [*keys, f"launch.num_processes={ranks}"], DEFAULTS)
    run = PlannedRun.of(config, find_device("cpu", ranks), ranks)
    times = measure_time(run, _BUDGET_S)
    return times, 1e3 * with_ranks(run, times, Assumptions(str(network), spread=0.0)).seconds


def trained(ranks: int, keys: list[str]) -> float:
    """Returns the median milliseconds of a step of ``dtrain train``."""
    with tempfile.TemporaryDirectory() as folder:
        given = {key.partition("=")[0] for key in keys}
        own = [*keys, *(f"{key}={value}" for key, value in DEFAULTS.items() if key not in given)]
        command = [sys.executable, "-m", "dtrain", "train", *own, f"launch.num_processes={ranks}", *_NOT_TIMED]
        command += [f"run_dir={folder}/run", f"train.steps={_STEPS}", "train.log_every=1"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        lines = [line for line in read_metrics(Path(folder, "run/metrics.jsonl")) if "step_ms" in line]
    return median(line["step_ms"] for line in lines[_SKIPPED:])


def measure(ranks: int, keys: list[str], network: Path) -> dict[str, Any]:
    """Returns planned and measured milliseconds of one case, in turn."""
    plans, steps = [], []
    for _ in range(_ROUNDS):
        plans.append(planned(ranks, keys, network))
        steps.append(trained(ranks, keys))
    ms, measured = median(planned_ms for _, planned_ms in plans), median(steps)
    plan = plans[-1][0]
    result = {"ranks": ranks, "keys": keys, "planned_ms": ms, "measured_ms": measured, "ratio": round(ms / measured, 3)}
    if ranks == 1 and plan.precision == "fp32" and "bf16" in plan.speedups:
        changed = ["precision=bf16" if key.startswith("precision=") else key for key in keys]
        speedup = median(trained(1, keys) / trained(1, changed) for _ in range(_ROUNDS))
        share, products = median(plan.product_share for plan in plans), median(plan.speedups["bf16"] for plan in plans)
        forecast = expected(share, products)
        result |= {
            "share": round(share, 3),
            "bf16_products": round(products, 3),
            "expected_speedup": round(forecast, 3),
            "measured_speedup": round(speedup, 3),
            "speedup_ratio": round(forecast / speedup, 3),
        }
    return result


def main() -> None:
    load = load_now()
    with tempfile.TemporaryDirectory() as folder:
        network = bench_collectives(folder, 2)
        cases = printed(measure(ranks, keys, network) for ranks, keys in CASES)
    write(load, defaults=DEFAULTS, cases=cases)


if __name__ == "__main__":
    main()
