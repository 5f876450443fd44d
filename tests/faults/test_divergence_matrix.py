"""Ranks in different methods of the engine: each ends with one named error, soon after the first, and none aborts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain.distributed import processes
from dtrain.distributed.transport.choose import make_communicator
from dtrain.errors import CommunicationError, DivergenceError
from tests.helpers.fault_counts import FaultCounts
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Run, start
from tests.helpers.zoo import make

pytestmark = pytest.mark.processes

RUN = Run("transformer", accumulation=2, options={"precision": "bf16", "ema_decay": 0.9})
ENTRY = make(RUN.model)
LIMIT_S = 2.0


def step(engine: Any, num_micro_batches: int = 2) -> None:
    for _ in engine.accumulate(range(num_micro_batches)):
        engine.backward(ENTRY.loss(engine, ENTRY.batch(0)))
    engine.step()


def validate(engine: Any) -> None:
    with engine.eval(), torch.no_grad():
        loss = ENTRY.loss(engine, ENTRY.batch(0))
    engine.comm.gather_rows(loss.reshape(1), label="validation loss")


def average(engine: Any) -> None:
    with engine.ema():
        pass


METHODS: dict[str, Callable[[Any, Path], Any]] = {
    "step": lambda engine, folder: step(engine),
    "step, one micro-batch more": lambda engine, folder: step(engine, 3),
    "step, one micro-batch fewer": lambda engine, folder: step(engine, 1),
    "save": lambda engine, folder: engine.save(folder / "new"),
    "asynchronous save": lambda engine, folder: engine.save(folder / "new", asynchronous=True),
    "wait_for_save": lambda engine, folder: engine.wait_for_save(),
    "load": lambda engine, folder: engine.load(folder / "old"),
    "eval": lambda engine, folder: validate(engine),
    "master_state": lambda engine, folder: engine.master_state(),
    "ema": lambda engine, folder: average(engine),
}


def diverge(rank: int, world: int, options: dict[str, Any], methods: list[str], path: Path) -> tuple[Any, ...]:
    """Calls one method on this rank; returns class, text and time of its error, and whether later calls repeat it."""
    if not options["shared_memory"]:  # several hosts, as far as the ranks know
        processes.host_identity = lambda: ["host", str(rank)]
    engine = start(RUN.with_options(engine=options["engine"], zero_stage=options["zero_stage"]))
    step(engine)
    if "load" in methods:
        engine.save(path / "old")
    if "wait_for_save" in methods:
        engine.save(path / "waited", asynchronous=True)
    masters = [shard.data.clone() for shard in engine.states.local_shards("master")]
    try:
        METHODS[methods[rank]](engine, path)
        engine.comm.barrier()  # a method without collectives of its own meets the others at the next one
    except (CommunicationError, DivergenceError) as error:
        seen = type(error).__name__, str(error), time.monotonic()
    else:
        return "", "no error", time.monotonic(), False
    repeats = "nothing was updated" in seen[1]  # found by the vote, after which the connections still work
    if not repeats:
        try:
            engine.comm.barrier()
        except (CommunicationError, DivergenceError) as error:
            repeats = type(error).__name__ == seen[0] and time.monotonic() - seen[2] < 0.1
        with pytest.raises(CommunicationError, match="the process group was closed when its ranks failed"):
            make_communicator(torch.distributed.group.WORLD, engine.device)
    if "load" not in methods:
        assert all(torch.equal(a, s.data) for a, s in zip(masters, engine.states.local_shards("master"), strict=True))
    (path / f"ended-{rank}").touch()
    while time.monotonic() < seen[2] + 2 * LIMIT_S and len(list(path.glob("ended-*"))) < world:
        time.sleep(0.01)  # the others end without the help of this process's end
    return *seen, repeats


def check(options: dict[str, Any], methods: list[str], folder: Path) -> float:
    """Runs one case; returns the seconds from the first error to the last."""
    folder.mkdir()
    results = run_ranks(len(methods), diverge, options, methods, folder, grace=10.0)
    case = f"{options}, {methods}: {results}"
    assert all(kind and repeats for kind, _, _, repeats in results), case
    assert any(kind == "DivergenceError" for kind, *_ in results), case
    for kind, message, *_ in results:
        assert kind == "DivergenceError" or "has failed" in message, case
        assert all(f"rank {rank}" in message for rank in (0, 1)) or len(methods) > 2, case
    times = [when for _, _, when, _ in results]
    assert max(times) - min(times) <= LIMIT_S, case
    return max(times) - min(times)


LIBRARIES = (("ddp", 0), ("fsdp2", 2), ("fsdp2", 3))


def cases() -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yields all pairs of methods, under native and the libraries, on 2 and 3 ranks, over both transports."""
    for engine, stage in (*(("native", stage) for stage in range(4)), *LIBRARIES):
        for world in (2, 3):
            for shared in (True, False):
                for number, (most, odd) in enumerate(permutations(METHODS, 2)):
                    methods = [most] * world
                    methods[number % world] = odd
                    yield {"engine": engine, "zero_stage": stage, "shared_memory": shared}, methods


@pytest.mark.timeout(7200)  # for the full counts
@pytest.mark.parametrize("share", ["first", pytest.param("rest", marks=pytest.mark.exhaustive)])
def test_every_rank_ends_with_one_named_error(tmp_path: Path, faults: FaultCounts, share: str) -> None:
    every, seed = list(cases()), 13
    chosen = every if faults.full else random.Random(seed).sample(every, 20)
    assert {engine for engine, _ in LIBRARIES} < {options["engine"] for options, _ in chosen}
    native = [options for options, _ in chosen if options["engine"] == "native"]
    assert len({tuple(options.values()) for options in native}) == 8, "all stages over both transports"
    assert {m for _, methods in chosen for m in methods if methods.count(m) == 1} == set(METHODS)
    own = chosen[:6] if share == "first" else chosen[6:]
    slowest = max(check(*case, tmp_path / str(number)) for number, case in enumerate(own))
    faults.passed("divergence", len(own), seed=seed, slowest_ms=round(1000 * slowest))
