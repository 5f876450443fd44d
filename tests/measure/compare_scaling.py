"""Simulates published scaling tables, and writes published and simulated efficiencies as JSON.

``python -m tests.measure.compare_scaling OUT.json`` takes some 5 minutes on a quiet core. The efficiency on some
GPUs is the throughput per GPU over that on the smallest number of the series. The published throughput on that number
says how fast the GPU computes; nothing else of a series is fitted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from dtrain.cli.resolve import compose
from dtrain.planning.devices import find_device
from dtrain.planning.planned_run import PlannedRun, RecordedSteps
from dtrain.planning.record.recorder import RecordedTransfer
from dtrain.planning.scale import with_ranks
from dtrain.planning.time.prediction import ENGINE, RING, RING_FP32, Assumptions, PricedRun

RESULTS = Path(__file__).parents[2] / "docs/results/scaling"
PUBLISHED, COMPARED = RESULTS / "published.json", RESULTS / "against-published.json"
PLACES = {  # of published devices: the one that is simulated, and its network
    "h100-96gb-500w": ("h100-80gb", "ib-400g"),
    "h100-80gb": ("h100-80gb", "ib-400g"),
    "h200-141gb": ("h200-141gb", "ib-400g"),
    "a100-40gb": ("a100-40gb", "ib-200g"),
}
DEFAULTS = Assumptions("")
"""Those of ``dtrain plan scale``, but the network."""
_MANY = 64

Series = dict[str, Any]


def read_series() -> list[Series]:
    series: list[Series] = json.loads(PUBLISHED.read_text(encoding="utf-8"))["series"]
    return series


def keys(series: Series, point: Series) -> list[str]:
    """Returns the keys of ``dtrain train`` for the model of ``series`` and the batches of ``point``.

    Float8 is simulated as a faster BF16.
    """
    model, micro = series["model"], series["micro_batch"]
    found = [
        "model=llama-8b" if model["gated"] else "model=gpt2-124m",
        f"model.num_layers={model['layers']}",
        f"model.hidden_dim={model['hidden']}",
        f"model.num_heads={model['heads']}",
        f"model.ffn_dim={model['ffn']}",
        f"model.vocab_size={model['vocabulary']}",
        f"model.max_seq_len={series['seq_len']}",
        f"model.recompute={series['recompute']}",
        "precision=bf16",
        "engine.zero_stage=3",
        "launch.device=cpu",
        f"train.micro_batch_size={micro}",
        f"train.global_batch_size={micro * point['gpus']}",
    ]
    if "SHARD_GRAD_OP" in series["sharding"]:  # it keeps gathered weights until backward has used them
        found.append("engine.reshard_after_forward=false")
    return found


def compare(series: Series, **changed: Any) -> dict[str, Any]:
    """Returns percentages of ``series``: published, simulated, and simulated with FSDP's reduce-scatters.

    Args:
        series: see above.
        changed: assumptions of the simulation other than the defaults.
    """
    device, network = PLACES[series["device"]]
    assumed = replace(DEFAULTS, network=network, **changed)
    first, *others = series["points"]
    priced = [_priced_on(series, point, device) for point in series["points"]]
    ring = RING if "reduced in bf16" in series["precision"] else RING_FP32
    efficiencies = [_efficiencies(series, priced, replace(assumed, gradients=by)) for by in (ENGINE, ring)]
    points = [
        {
            "gpus": point["gpus"],
            "published": round(100 * point["tokens_per_s_per_gpu"] / first["tokens_per_s_per_gpu"], 1),
            "simulated": round(100 * efficiencies[0][number], 1),
            "reduce_scatter": round(100 * efficiencies[1][number], 1),
        }
        for number, point in enumerate(others)
    ]
    return {"name": series["name"], "base": first["gpus"], "points": points}


def _priced_on(series: Series, point: Series, device: str) -> PricedRun:
    """Returns what a rank does; from ``_MANY`` GPUs on that of the first number, with its transfers scaled.

    On more GPUs only the padding of the buffers and the update, a thousandth of a step by then, would differ.
    """
    first = point if point["gpus"] < _MANY else next(one for one in series["points"] if one["gpus"] >= _MANY)
    recorded = _recorded(tuple(keys(series, first)), first["gpus"], device)
    if first is not point:
        recorded = _scaled(recorded, first["gpus"], point["gpus"])
    return PricedRun.of(recorded, DEFAULTS.efficiency)


def _scaled(recorded: RecordedSteps, gpus: int, more: int) -> RecordedSteps:
    """Returns ``recorded``, of ``gpus`` GPUs, with the transfers of ``more``."""

    def of_more(one: RecordedTransfer) -> RecordedTransfer:
        nbytes = one.transfer.nbytes / (gpus - 1) * (more - 1)
        if one.transfer.op != "gather_rows":  # of the vote, whose row is as long on any number
            nbytes *= gpus / more
        return replace(one, transfer=replace(one.transfer, nbytes=round(nbytes), world_size=more))

    steps = [
        replace(step, transfers={number: of_more(one) for number, one in step.transfers.items()})
        for step in recorded.steps
    ]
    return replace(
        recorded,
        run=with_ranks(recorded.run, more, recorded.run.config.train.global_batch_size // gpus * more),
        steps=steps,
    )


@cache
def _recorded(keys: Sequence[str], gpus: int, device: str) -> RecordedSteps:
    return PlannedRun.of(compose(keys), find_device(device), gpus).record(for_time=True)


def _efficiencies(series: Series, priced: Sequence[PricedRun], assumed: Assumptions) -> list[float]:
    """Returns the simulated efficiency on all numbers of GPUs but the smallest."""

    def seconds(of: PricedRun, factor: float) -> float:
        return of.predict(replace(assumed, step_ms=1e3 * factor * of.parts.total)).step.seconds

    target = series["micro_batch"] * series["seq_len"] / series["points"][0]["tokens_per_s_per_gpu"]
    low, high = 0.01, 100.0
    for _ in range(50):  # a bisection
        middle = (low * high) ** 0.5
        low, high = (low, middle) if seconds(priced[0], middle) > target else (middle, high)
    return [target / seconds(one, low) for one in priced[1:]]


def table(compared: Sequence[dict[str, Any]]) -> str:
    """Returns the table of ``docs/results/scaling/README.md``: percentages, and the differences in points."""
    lines = [
        "| series | GPUs | published | simulated | difference | with reduce-scatters |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in compared:
        points = row["points"]
        gpus = " ".join(str(point["gpus"]) for point in points)
        differences = " ".join(f"{point['simulated'] - point['published']:+.1f}" for point in points)
        published, simulated, other = (
            " ".join(str(point[name]) for point in points) for name in ("published", "simulated", "reduce_scatter")
        )
        lines.append(f"| {row['name']} | {row['base']}: {gpus} | {published} | {simulated} | {differences} | {other} |")
    return "\n".join(lines)


def largest_differences(compared: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns the largest difference from what is published, in points, of each simulation."""
    points = [point for row in compared for point in row["points"]]
    largest = {}
    for name in ("simulated", "reduce_scatter"):
        differences: list[float] = [point[name] - point["published"] for point in points]
        farthest = max(differences, key=abs)
        largest[name] = round(farthest, 1)
    return largest


def main() -> None:
    variants: dict[str, dict[str, Any]] = {
        "defaults": {},
        "overlap_slowdown=1": {"overlap_slowdown": 1.0},
        "spread=0": {"spread": 0.0},
    }
    compared: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    for series in read_series():
        for name, changed in variants.items():
            compared[name].append(compare(series, **changed))
        print(compared["defaults"][-1], flush=True)
    largest = {name: largest_differences(rows) for name, rows in compared.items()}
    results = {"series": compared["defaults"], "largest_differences": largest}
    Path(sys.argv[1]).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(compared["defaults"]))


if __name__ == "__main__":
    main()
