"""Predicts the model FLOPs utilization of published runs without fitting, and writes both as JSON.

``python -m tests.measure.compare_mfu OUT.json`` takes some 3 minutes on a quiet core. A step's time comes from the
model, the batch, the GPUs and their network alone, by the assumptions of ``dtrain plan scale``, with reduce-scatters as
those runs have. A model is planned with two numbers of layers; each further layer takes what the last ones added.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from dtrain.cli.resolve import compose
from dtrain.planning.devices import find_device
from dtrain.planning.planned_run import PlannedRun, RecordedSteps
from dtrain.planning.time.prediction import RING, RING_FP32, Assumptions, PricedRun

RESULTS = Path(__file__).parents[2] / "docs/results/scaling"
PUBLISHED, COMPARED = RESULTS / "published-mfu.json", RESULTS / "against-published-mfu.json"
PEAKS = {"h100": 989e12, "a100": 312e12}
"""FLOP/s by which the published percentages are formed."""

_DEVICES = {"h100-96gb-500w": "h100-80gb"}
"""Published devices that are predicted as another one; the power limit is not modeled."""
_LAYERS = (2, 4)

Row = dict[str, Any]


def predict(row: Row, model: Row) -> float:
    """Returns the seconds of a step of ``row``, as ZeRO stage 3 would take it; both are of ``PUBLISHED``."""
    device = find_device(_DEVICES.get(row["device"], row["device"]))
    assumed = Assumptions(row["network"], gradients=RING_FP32 if "fp32" in row["precision"] else RING)
    few, more = (
        PricedRun.of(_on(device.name, _recorded(tuple(keys(row, model, layers)), row["gpus"])), assumed.efficiency)
        .predict(assumed)
        .step.seconds
        for layers in _LAYERS
    )
    short, long = _LAYERS
    return float(more + (model["layers"] - long) * (more - few) / (long - short))


def _on(device: str, recorded: RecordedSteps) -> RecordedSteps:
    return replace(recorded, run=replace(recorded.run, device=find_device(device)))


@lru_cache(maxsize=len(_LAYERS))
def _recorded(overrides: tuple[str, ...], gpus: int) -> RecordedSteps:
    return PlannedRun.of(compose(overrides), find_device("h100-80gb"), gpus).record(for_time=True)


def keys(row: Row, model: Row, layers: int) -> list[str]:
    """Returns the keys of ``dtrain train``.

    If heads are grouped, a feed-forward of two matrices is one of three with the same FLOPs: only that model has them.
    """
    is_llama = model["gated"] or model["kv_heads"] != model["heads"]
    found = [
        "model=llama-8b" if is_llama else "model=gpt2-124m",
        f"model.num_layers={layers}",
        f"model.hidden_dim={model['hidden']}",
        f"model.num_heads={model['heads']}",
        f"model.ffn_dim={model['ffn'] if model['gated'] or not is_llama else model['ffn'] * 2 // 3}",
        f"model.vocab_size={model['vocabulary']}",
        f"model.tie_embeddings={str(model['tied']).lower()}",
        f"model.max_seq_len={row['seq_len']}",
        f"model.recompute={row['recompute']}",
        "precision=bf16",
        "engine.zero_stage=3",
        "launch.device=cpu",
        f"train.micro_batch_size={row['micro_batch']}",
        f"train.global_batch_size={row['global_batch']}",
    ]
    if is_llama:
        found.append(f"model.num_kv_heads={model['kv_heads']}")
    if "SHARD_GRAD_OP" in row["parallelism"]:  # it keeps gathered weights until backward has used them
        found.append("engine.reshard_after_forward=false")
    return found


def model_flops(row: Row, model: Row) -> int:
    """Returns the model FLOPs of a token by the convention of ``row``; attention counts in full."""
    attention = 12 * model["layers"] * model["hidden"] * row["seq_len"]
    if row["flops"] == "parameters":
        return int(6 * model["parameters"] + attention)
    head_dim = model["hidden"] // model["heads"]
    projections = 2 * model["hidden"] * head_dim * (model["heads"] + model["kv_heads"])
    feed_forward = (3 if model["gated"] else 2) * model["hidden"] * model["ffn"]
    matrices = model["layers"] * (projections + feed_forward) + model["vocabulary"] * model["hidden"]
    return int(6 * matrices + attention)


def mfu(row: Row, model: Row, seconds: float) -> float:
    """Returns the percentage that a step of ``seconds`` reaches."""
    tokens = row["global_batch"] * row["seq_len"] / row["gpus"]
    return float(100 * tokens / seconds * model_flops(row, model) / PEAKS[row["device"].split("-")[0]])


def compare(row: Row, model: Row) -> Row:
    """Returns the published and the predicted percentage of ``row``, and the distance in points."""
    published, predicted = row["mfu_percent"], mfu(row, model, predict(row, model))
    distance = round(predicted - published, 1)
    named = {"name": row["name"], "gpus": row["gpus"], "published": published}
    return {**named, "predicted": round(predicted, 1), "distance": distance}


def summary(rows: Sequence[Row]) -> Row:
    """Returns the mean distance without and with its sign, the largest, and how many are within three points."""
    distances = [row["distance"] for row in rows]
    return {
        "rows": len(rows),
        "mean": round(sum(map(abs, distances)) / len(rows), 1),
        "signed_mean": round(sum(distances) / len(rows), 1),
        "largest": max(distances, key=abs),
        "within_3_points": sum(abs(distance) <= 3 for distance in distances),
    }


def summaries(rows: Sequence[Row]) -> dict[str, Row]:
    """Returns the summary of all rows, of each GPU, and of the largest group of one software on H100s."""
    groups = {
        "all": rows,
        "A100": [row for row in rows if "A100" in row["name"]],
        "H100": [row for row in rows if "A100" not in row["name"]],
        "H100, llm-foundry": [row for row in rows if "MPT" in row["name"] and "H100" in row["name"]],
        "H100, NeMo": [row for row in rows if row["name"].startswith(("NVIDIA Llama 3.1", "NVIDIA Nemotron"))],
    }
    return {name: summary(group) for name, group in groups.items()}


def table(compared: Sequence[Row]) -> str:
    """Returns the table of ``docs/results/scaling/README.md``, the farthest first."""
    lines = ["| run | GPUs | published | predicted | distance |", "| --- | --- | --- | --- | --- |"]
    for row in sorted(compared, key=lambda row: -abs(row["distance"])):
        cells = f"{row['published']:.1f} | {row['predicted']:.1f} | {row['distance']:+.1f}"
        lines.append(f"| {row['name']} | {row['gpus']} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    read = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    compared = []
    for row in read["rows"]:
        compared.append(compare(row, read["models"][row["model"]]))
        print(compared[-1], file=sys.stderr, flush=True)
    results = {"summaries": summaries(compared), "rows": compared}
    Path(sys.argv[1]).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(compared))
    for name, found in summaries(compared).items():
        print(name, found)


if __name__ == "__main__":
    main()
