"""Plans against what ranks really take, on configurations that they were not tuned on, and against what they send.

The resident set is measured by ``tests.measure.memory_plan``.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from dtrain.cli.resolve import compose, read_jobs
from dtrain.config.schema import RunConfig
from dtrain.distributed.startup.setup import connect
from dtrain.distributed.transport.host_memory import HostMemory
from dtrain.planning.devices import find_device
from dtrain.planning.memory.plan import peaks_of, plan_memory
from dtrain.planning.planned_run import PlannedRun, split_memory
from dtrain.planning.record.ranks import REPLICATE, SHARD, WORLD
from dtrain.planning.record.recorder import StepRecorder
from dtrain.train.session import Session
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

_RECOMPUTED = "model.factory=tests.helpers.planned_models:Recomputed"
_CONVOLUTIONS = "model.factory=tests.helpers.planned_models:Convolutions"

CASES: list[tuple[int, list[str]]] = [  # ranks and keys
    (1, ["precision=fp32", "engine.zero_stage=0"]),
    (1, ["precision=bf16", "train.micro_batch_size=4", "model.dropout=0.1"]),
    (1, ["precision=bf16", "optim=lion", _RECOMPUTED]),
    (1, ["precision=fp8", "model.num_kv_heads=2", "train.micro_batch_size=2"]),
    (2, ["precision=fp32", "engine.zero_stage=1", _CONVOLUTIONS]),
    (2, ["precision=bf16", "engine.zero_stage=2", "optim=adamw-bf16"]),
    (2, ["precision=bf16", "engine.zero_stage=3", _RECOMPUTED, "train.global_batch_size=32"]),
    (2, ["precision=fp32", "engine.zero_stage=3", "engine.prefetch=0", "ema.decay=0.99"]),
    (2, ["precision=bf16", "engine.zero_stage=2", "launch.shared_memory=false", "model=gpt2-124m"]),
    (3, ["precision=fp32", "engine.zero_stage=2", "engine.reproducible=true", "train.global_batch_size=48"]),
    (4, ["precision=bf16", "engine.zero_stage=3", "engine.reshard_after_forward=false", "train.global_batch_size=32"]),
    (4, ["precision=fp32", "engine.zero_stage=1", "train.micro_batch_size=2", "model.max_seq_len=128"]),
]
TINY = {"model.num_layers": 3, "model.hidden_dim": 96, "model.num_heads": 4, "model.max_seq_len": 64}
TINY |= {"train.micro_batch_size": 4, "train.save_every": 0}  # the steps below do not save


def configuration(ranks: int, keys: list[str], defaults: dict[str, Any]) -> RunConfig:
    """Returns the configuration of ``keys``, which replace ``defaults``."""
    given = {key.partition("=")[0] for key in keys}
    config = compose([*keys, *(f"{key}={value}" for key, value in defaults.items() if key not in given)])
    train = config.train
    whole = max(train.global_batch_size, ranks * train.micro_batch_size)
    return replace(config, train=replace(train, global_batch_size=whole - whole % (ranks * train.micro_batch_size)))


def build(config: RunConfig, comm: Any) -> tuple[Session, list[dict[str, torch.Tensor]]]:
    """Returns a session, and the micro-batches of a step, which are all the same."""
    session, size = Session.open(config, comm), config.train.micro_batch_size
    source = session.dataset.train
    batch = source.batch(source.order(0, np.arange(size, dtype=np.int64)))
    return session, [batch] * (config.train.global_batch_size // (size * comm.world_size))


def storages_of(rank: int, world: int, keys: list[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the bytes between real steps, and those at the peak of the second one."""
    config = configuration(world, keys, TINY)
    comm = connect(torch.device("cpu"), shared_memory=config.launch.shared_memory)
    with StepRecorder() as recorder:
        session, batch = build(config, comm)
        gc.collect()
        foreign = comm.memory.foreign if isinstance(comm, HostMemory) else []
        recorder.label(None, (torch.empty(0, dtype=torch.uint8).set_(storage) for storage in foreign))
        counts = [len(batch)] * 2
        steps = recorder.record_steps(session.engine, lambda _, watch: session.step(batch, watch=watch), counts)
        return split_memory(session.engine)[0], peaks_of(recorder.storages, steps)[-1]


_ADAPTED = "model.factory=tests.helpers.planned_models:Adapted"
_NO_TOKENS = ["model.num_layers=1", "model.num_heads=4", "model.max_seq_len=256", "data.size=12", "model.hidden_dim=16"]
_LATER = [  # than measurements of the resident set
    (2, ["precision=bf16", "engine.zero_stage=2", "optim=muon"]),
    (2, ["precision=bf16", "engine.zero_stage=3", _ADAPTED]),
    (1, ["precision=fp8", _ADAPTED]),
    (2, ["precision=fp8", "engine.zero_stage=3", _ADAPTED]),
    (1, ["precision=bf16", "model.factory=tests.helpers.planned_models:Experts"]),
    (1, ["precision=bf16", "model.loss_chunk=64", "model.vocab_size=4096"]),
    (1, ["precision=bf16", "model.recompute=full", "model.recompute_every=2"]),
    (2, ["precision=bf16", "engine.zero_stage=3", "model.recompute=selective"]),
    (2, ["experiment=glyphs", "precision=fp32", *_NO_TOKENS]),
    (1, ["experiment=diffusion", "precision=fp32", *_NO_TOKENS]),
]


QUICK = {7, 15}
"""Cases of the default tier: FP32 with an average, and FP8 with frozen weights."""


@pytest.mark.parametrize(
    ("ranks", "keys"),
    [
        pytest.param(*case, id="-".join([str(case[0]), *case[1]]), marks=[] if n in QUICK else pytest.mark.exhaustive)
        for n, case in enumerate([*CASES, *_LATER])
    ],
)
def test_plan_equals_the_distinct_storages(ranks: int, keys: list[str]) -> None:
    config = configuration(ranks, keys, TINY)
    plan = plan_memory(PlannedRun.of(config, find_device("cpu", ranks), ranks))
    states, peak = run_ranks(ranks, storages_of, keys)[0]
    assert plan.states == states
    assert plan.tensors == pytest.approx(sum(peak.values()), rel=0.03), (plan.peak, peak)


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
    session, batch = build(config, comm)
    for _ in range(3):
        with mock.patch.object(comm.schedule, "record", wraps=comm.schedule.record) as record:
            session.step(batch)
    return [(op, label, tensor.nbytes) for op, label, tensor in (call.args for call in record.call_args_list)]


@cache
def simulated(device: str, world: int, *keys: str) -> list[tuple[str, str, int]]:
    """Returns the same of a simulated step, with the bytes of the whole tensor."""
    config = config_of(world, [*keys])
    recorded = PlannedRun.of(config, find_device(device, world), world).record(for_time=True)
    size = getattr(config.engine, "shard_size", None) or world
    found = []
    for transfer in (one.transfer for one in recorded.steps[-1].transfers.values()):
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
