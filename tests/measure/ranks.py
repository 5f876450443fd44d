"""Measures what the number of ranks costs each rank's host, without those ranks, and writes JSON.

``python -m tests.measure.ranks OUT.json [NAME=VALUE]...`` takes some five minutes; ``ranks=64,1024`` and
``cases=vote,save`` choose. Each case runs in a process of its own, on fake tensors, torch's fake process group, or what
the other ranks would have sent; no rank is started and nothing is sent. Seconds are of the processor; ``peak_mib``
is the growth of the resident set.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dtrain.checkpoint.commit import _assemble
from dtrain.checkpoint.format.manifest import Manifest
from dtrain.checkpoint.reader import CheckpointReader
from dtrain.checkpoint.snapshot import Snapshot
from dtrain.distributed.consensus import on_every_rank
from dtrain.engine.vote.record import NUM_FIELDS
from dtrain.errors import CheckpointError
from tests.helpers.many_ranks import (
    LLAMA_8B,
    Texts,
    planned_run,
    seconds,
    sent_gradient,
    vote_host_work,
    vote_rows,
)
from tests.helpers.ranks import run_ranks
from tests.measure.results import load_now, printed, write

RANKS = (8, 64, 256, 1024, 4096)
_CPU = torch.device("cpu")
_ROUNDS = 5  # of what is short


# -- the engine --------------------------------------------------------------------------------------------------------


def build(ranks: int, *keys: str) -> dict[str, float]:
    def run() -> None:
        with planned_run(ranks, *keys).engine():
            pass

    return {"seconds": seconds(run)}


def muon(ranks: int) -> dict[str, float]:
    """Builds with an optimizer of whole matrices, whose owners all ranks must know."""
    return build(ranks, "optim=muon")


def step(ranks: int, *keys: str) -> dict[str, float]:
    """The second step; fake tensors make each operation some 50 times slower than on a device."""
    with planned_run(ranks, *keys).engine() as (_, take_step):
        take_step()
        return {"seconds": seconds(take_step)}


def sharded_step(ranks: int) -> dict[str, float]:
    """Takes the same step at stage 3."""
    return step(ranks, "engine.zero_stage=3")


def audit(ranks: int) -> dict[str, float]:
    """The intervals of an audit at stage 2, each of which is fingerprinted by itself."""
    with planned_run(ranks).engine() as (engine, _):
        found: list[Any] = []
        taken = seconds(lambda: found.extend(engine.states.whole_compute_shards()))
        return {"seconds": taken, "intervals": len(found)}


# -- a step ------------------------------------------------------------------------------------------------------------


def vote(ranks: int) -> dict[str, float]:
    """Measures the host's work on the rows of the ranks, and the bytes that a rank receives."""
    rows = vote_rows(ranks)
    run = vote_host_work(rows)
    run()
    return {"seconds": seconds(run, 20), "bytes": rows.nbytes, "bytes_by_formula": ranks * NUM_FIELDS * 8}


def gradient(ranks: int) -> dict[str, float]:
    """One send of a flat buffer's gradient of 1,024 elements a rank: its copy, and what arrives, without their sum."""
    with sent_gradient(ranks) as (fill, send, receive):
        filled, received = [], []
        for _ in range(20):
            filled.append(seconds(fill))
            send()
            received.append(seconds(receive))
        return {"fill_seconds": median(filled), "receive_seconds": median(received)}


# -- saves and loads ---------------------------------------------------------------------------------------------------


def _reports(ranks: int) -> list[dict[str, Any]]:
    """Returns what each rank reports of its file when llama-8b is saved."""
    with planned_run(ranks).engine() as (engine, _):
        plans, kinds = engine.sharded.layouts, list(engine.states.saved_dtypes)
    reports = []
    for rank in range(ranks):
        file = f"r{rank:04d}.safetensors"
        rows = [
            (kind, i.spec.name, "F32", i.spec.shape, i.start, i.stop, f"{kind}:{i.spec.name}", 0)
            for layout in plans
            for i in layout.intervals(*layout.shard(rank))
            for kind in kinds
        ]
        reports.append({"file": file, "bytes": 1, "hash": "sha256", "digest": "0" * 64, "shards": json.dumps(rows)})
    return reports


def save(ranks: int) -> dict[str, float]:
    """The reports of all ranks, which each rank parses; the manifest, which rank 0 checks and writes."""
    texts = [json.dumps({"value": report}) for report in _reports(ranks)]
    result: dict[str, float] = {"report_bytes": sum(map(len, texts))}
    found: list[Any] = []
    result["reports_seconds"] = seconds(
        lambda: found.extend(on_every_rank(Texts(ranks, texts), "", dict, CheckpointError))
    )
    made: list[bytes] = []
    snapshot = Snapshot(1, (), {})
    result["manifest_seconds"] = seconds(lambda: made.append(_assemble(snapshot, found).encode()))
    return {**result, "manifest_bytes": len(made[0])}


def load(ranks: int) -> dict[str, float]:
    """The manifest, which each rank parses, and the fingerprints of what all ranks have loaded."""
    reports = _reports(ranks)
    shards = (json.loads(report["shards"]) for report in reports)
    rows = [json.dumps({"value": [(*row[:2], *row[4:6], 0) for row in of_rank]}) for of_rank in shards]
    data = _assemble(Snapshot(1, (), {}), reports).encode()
    del reports
    manifests: list[Manifest] = []
    result = {"manifest_seconds": seconds(lambda: manifests.append(Manifest.decode(data)))}
    reader = CheckpointReader(Path("x"), manifests[0])
    result["fingerprints_seconds"] = seconds(lambda: reader.check_fingerprints((), Texts(ranks, rows)))
    return {**result, "fingerprints_bytes": sum(map(len, rows))}


_WORK = (build, muon, step, sharded_step, audit, vote, gradient, save, load)
CASES: dict[str, Callable[[int], dict[str, float]]] = {work.__name__: work for work in _WORK}


def measured(rank: int, world: int, name: str, ranks: int) -> dict[str, Any]:
    """Returns what a case measures, with its peak memory, or why it failed."""
    build(8)  # loads the libraries
    before = resident_mib()
    try:
        return {key: float(f"{value:.4g}") for key, value in CASES[name](ranks).items()} | {
            "peak_mib": round(resident_mib() - before)
        }
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def resident_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    options = dict(word.split("=", 1) for word in sys.argv[2:])
    ranks = [int(number) for number in options.get("ranks", ",".join(map(str, RANKS))).split(",")]
    average, names = load_now(), options.get("cases", ",".join(CASES)).split(",")
    of = lambda name, n: run_ranks(1, measured, name, n, fresh=True, timeout=1800.0)[0]  # noqa: E731
    found = ({"case": name, "ranks": n, **of(name, n)} for name in names for n in ranks)
    write(average, model=list(LLAMA_8B), cases=printed(found))


if __name__ == "__main__":
    main()
