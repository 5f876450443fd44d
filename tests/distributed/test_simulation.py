"""The schedule that ``dtrain simulate`` derives is the one of real ranks: the same collectives, of the same bytes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from dtrain.cli.resolve import read_jobs
from dtrain.config.schema import RunConfig
from dtrain.distributed.setup import connect
from dtrain.planning.devices import find_device
from dtrain.planning.timeline import REPLICATE, SHARD, WORLD
from dtrain.tools.simulate.step import trace_run
from dtrain.train.planned import PlannedRun
from tests.distributed.test_memory_plan import TINY, build
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

_MICRO_BATCHES = 3  # of a rank; the simulation repeats the last of more
HYBRID = ["precision=fp32", "engine.shard_size=2", "engine.zero_stage=2"]
MORE = [  # ranks and keys
    (2, ["precision=bf16", "engine.zero_stage=1"]),
    (2, ["precision=bf16", "engine.zero_stage=3", "engine.prefetch=0"]),
    (4, ["precision=bf16", "engine.zero_stage=2"]),
    (4, ["precision=bf16", "engine.shard_size=2", "engine.zero_stage=3"]),
    (4, ["precision=fp32", "engine.shard_size=2", "engine.zero_stage=3", "engine.reproducible=true"]),
]


def config_of(world: int, keys: list[str]) -> RunConfig:
    whole = _MICRO_BATCHES * TINY["train.micro_batch_size"] * world
    common = ["launch.shared_memory=false", f"train.global_batch_size={whole}", "launch.device=cpu"]
    small = [f"{key}={value}" for key, value in {**TINY, "model.num_layers": 2}.items()]
    (job,) = read_jobs([*small, *common, *keys], "", world)
    return job.config


def third_step(rank: int, world: int, keys: list[str]) -> list[tuple[str, str, int]]:
    """Returns operation, label and bytes of the collectives of a real step."""
    config = config_of(world, keys)
    comm = connect(torch.device("cpu"), shared_memory=False)
    engine, batch, count = build(config, comm)
    found: list[tuple[str, str, int]] = []
    record = comm.schedule.record

    def recorded(op: str, label: str, tensor: torch.Tensor) -> Any:
        found.append((op, label, tensor.nbytes))
        return record(op, label, tensor)

    comm.schedule.record = recorded  # type: ignore[method-assign]
    for _ in range(3):
        found.clear()
        for micro in engine.accumulate([batch] * count):
            engine.backward(engine(**micro))
        engine.step()
    return found


@cache
def simulated(device: str, world: int, *keys: str) -> list[tuple[str, str, int]]:
    """Returns the same of a simulated step, with the bytes of the whole tensor."""
    config = config_of(world, [*keys])
    traced = trace_run(PlannedRun.of(config, find_device(device, world), world), 0.7, 100.0)
    size = getattr(config.engine, "shard_size", None) or world
    found = []
    for transfer in traced.transfers:
        expected = {WORLD: world, SHARD: size, REPLICATE: world // size}[transfer.axis]
        assert (transfer.world_size, transfer.stride) == (expected, size if transfer.axis == REPLICATE else 1)
        # a CPU sends and sums in place of a reduce-scatter
        op = "all_to_all_single" if transfer.op == "reduce_scatter_sum" else transfer.op
        nbytes = transfer.nbytes * expected // (expected - 1)
        # of rows one is recorded, and of an all-to-all of unequal parts those of all ranks
        recorded = nbytes // expected if op == "gather_rows" else nbytes * expected if op == "all_to_all" else nbytes
        found.append((op, transfer.label, recorded))
    return found


@pytest.mark.parametrize(
    ("world", "keys"), [(4, HYBRID), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE)]
)
def test_the_simulated_schedule_is_that_of_real_ranks(world: int, keys: list[str]) -> None:
    real = run_ranks(world, third_step, keys)
    assert len(real[0]) > 5
    assert real == [simulated("cpu", world, *keys)] * world


def test_gpus_send_what_cpus_send() -> None:
    """In another order: only GPUs compute while the sums over replicas are under way."""
    assert sorted(simulated("h100-80gb", 4, *HYBRID)) == sorted(simulated("cpu", 4, *HYBRID))
