"""One rank that differs: the run stops before any update, and every rank shows both values (F9).

The ranks differ in the arguments of ``dtrain.initialize``, in the configuration or data of ``dtrain train``, or in a
step. All cases run on the same ranks, one after the other, so each must also leave the ranks in step with each other.
"""

from __future__ import annotations

import copy
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dtrain
from dtrain.cli.resolve import compose
from dtrain.config.schema import RunConfig
from dtrain.data import load_dataset
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.startup.setup import connect
from dtrain.engine.vote.record import MUST_AGREE
from dtrain.errors import ConfigError, DivergenceError
from dtrain.precision.loss_scale import LossScaleState
from dtrain.precision.policy import PrecisionPolicy
from dtrain.train.setup import check_same
from tests.helpers.fault_counts import FaultCounts
from tests.helpers.launch import SEQ_LEN, SMALL, write_samples
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Run, forward_backward, start

pytestmark = pytest.mark.processes


def differing(message: str, expected: str) -> str:
    """Returns nothing if the message has all parts of ``expected``, what it is on two ranks, else what it lacks."""
    parts = [*expected.split("|"), "on rank 0", "on rank"]
    return "".join(f"no {part!r} in {message!r}; " for part in parts if part not in message)


class Ordered(nn.Module):
    """Two linear layers, registered in any order, with a buffer."""

    def __init__(self, names: str = "ab", dtype: torch.dtype | None = None) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(4, 4, dtype=dtype))
        self.act: nn.Module = nn.Dropout(0.0)
        self.register_buffer("count", torch.zeros(3))


def changed(**attributes: Any) -> nn.Module:
    model = Ordered()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def frozen() -> nn.Module:
    model = Ordered()
    model.b.weight.requires_grad_(False)
    return model


def dense(dim: int) -> nn.Module:
    return nn.Sequential(nn.Linear(dim, dim))


def tied() -> nn.Module:
    model = Ordered()
    model.b.weight = model.a.weight
    return model


class Start:
    """Arguments of ``dtrain.initialize``: ``base`` and ``common`` of all, the rest of the last rank."""

    def __init__(self, expected: str, model: Any = None, base: Any = Ordered, common: Any = (), **values: Any) -> None:
        self.expected, self.model, self.base, self.common, self.options = expected, model, base, dict(common), values


BF16, FP8 = {"precision": "bf16"}, {"precision": "fp8"}
STARTS = [
    # configuration
    Start("is quantized on rank 0 and fp32 on rank", engine="ddp", zero_stage=0),
    Start("'sharding_units' is auto on rank 0 and ['a'] on rank", sharding_units=["a"]),
    Start("'betas' is [0.9, 0.95] on rank 0 and [0.8, 0.9] on rank", optimizer=dtrain.AdamW(betas=(0.8, 0.9))),
    Start("'ema_decay' is None on rank 0 and 0.9 on rank", ema_decay=0.9),
    Start("seed is 0 on rank 0 and 1 on rank", seed=1),
    # learning rate
    Start("'lr' is 0.001 on rank 0 and 0.5 on rank", optimizer=dtrain.AdamW(lr=0.5)),
    Start("schedule: 'min_ratio' is None on rank 0 and 0.1 on rank", schedule=dtrain.Cosine(2, total_steps=9)),
    # dtype
    Start("'compute' is fp32 on rank 0 and bf16 on rank", precision="bf16"),
    Start("a: 'format' is fp32 on rank 0 and bf16 on", precision=PrecisionPolicy.named("fp32", rules={"a": "bf16"})),
    Start("is fp32 on rank 0 and bf16 on rank", common=BF16 | {"zero_stage": 0}, reduce_dtype="bf16"),
    Start("'float8' is None on rank 0 and {'choice': ", common=BF16, precision="fp8"),
    # one rank has some products to decide about, the other none
    Start("is first product on rank 0 and too small for FP8: a dimension", lambda: dense(8), lambda: dense(16), FP8),
    Start("a.bias: 'dtype' is float32 on rank 0 and bfloat16 on rank", lambda: Ordered(dtype=torch.bfloat16)),
    Start("count: 'dtype' is float32 on rank 0 and int64 on", lambda: changed(count=torch.zeros(3).long())),
    # loss scale
    Start("loss_scale: 'mode' is none on rank 0 and dynamic on rank", loss_scale="dynamic"),
    Start("loss_scale: 'init' is 65536.0 on rank 0 and 8.0 on rank", loss_scale=8.0),
    # the model, and with it the order of collectives
    Start("a.bias: 'position' is 1 on rank 0 and 3 on rank", lambda: Ordered("ba")),
    Start("features=4, bias=True) on rank 0 and Linear(in_features=4, out", lambda: changed(a=nn.Linear(4, 5))),
    Start("b.weight: 'trainable' is True on rank 0 and False on rank", frozen),
    Start("'b.weight' is fp32 on rank 0 and None on rank", tied),
    Start("'act' is Dropout(p=0.0, inplace=False) on rank 0 and ReLU() on rank", lambda: changed(act=nn.ReLU())),
]


def start_differently(case: Start, rank: int, world: int) -> str:
    """Returns what was wrong."""
    other = rank == world - 1
    built = (case.model if other and case.model else case.base)()
    before = copy.deepcopy(built.state_dict())
    options = {"precision": "fp32", "seed": 0, **case.common, **(case.options if other else {})}
    try:
        dtrain.initialize(built, **options)
    except DivergenceError as error:
        touched = [name for name, tensor in built.state_dict().items() if not torch.equal(tensor, before[name])]
        return differing(str(error), case.expected) + (f"changed: {touched}" if touched else "")
    return "accepted"


CONFIGS: list[tuple[str, str, Any, str]] = [  # group, key and value on the last rank
    ("", "seed", 3, "'seed' is 0 on rank 0 and 3 on rank"),
    ("ema", "decay", 0.9, "ema: 'decay' is None on rank 0 and 0.9"),
    ("model", "dropout", 0.2, "model: 'dropout' is 0.1 on rank 0 and 0.2 on rank"),
    ("engine", "zero_stage", 3, "engine: 'zero_stage' is 2 on rank 0 and 3 on rank"),
    ("checkpoint", "keep_last", 5, "checkpoint: 'keep_last' is 2 on rank 0 and 5 on rank"),
    ("data", "files", "other.txt", "data: 'files' is samples.txt on rank 0 and other.txt on rank"),
]


def compare(comm: Communicator, config: RunConfig, expected: str) -> str:
    """Returns what was wrong; the data are ``samples.txt`` in the current directory of each rank."""
    dataset = load_dataset(replace(config.data, files="samples.txt"), SEQ_LEN)
    try:
        check_same(comm, config, dataset)
    except ConfigError as error:
        return differing(str(error), expected)
    return "accepted"


def other_data(comm: Communicator, config: RunConfig, text: str) -> str:
    """The same file name holds another text on the last rank."""
    before, folder = Path.cwd(), Path(f"rank-{comm.rank}")
    folder.mkdir(exist_ok=True)
    write_samples(folder)
    if comm.rank == comm.world_size - 1:
        (folder / "samples.txt").write_text(text, encoding="ascii")
    os.chdir(folder)
    try:
        own = load_dataset(replace(config.data, files="samples.txt"), SEQ_LEN).fingerprint[:12]
        prints = comm.exchange_text(own)
        return compare(comm, config, f"the data differs|{prints[0]} on rank 0|{prints[-1]} on rank")
    finally:
        os.chdir(before)


RUN = Run("transformer", options={"precision": "fp32"})
STEPS = {
    "step": "step is 1 on rank 0 and 2 on rank",
    "data_cursor": "data_cursor is 0 on rank 0 and 16 on rank",
    "loss_scale": "loss_scale is 1.0 on rank 0 and 8.0 on rank",
    "config_hash": "'max_grad_norm' is 0.05 on rank 0 and 0.5 on rank",
    "num_micro_batches": "num_micro_batches is 1 on rank 0 and 2 on rank",
    "lr": "lr is 0.001 on rank 0 and 0.5 on rank",
    "max_grad_norm": "max_grad_norm is 0.05 on rank 0 and inf on rank",
    "grad_factor": "grad_factor is 1.0 on rank 0 and 2.0 on rank",
    "written_weights": "parameter 'embedding.weight' was written to on rank |and not on rank 0",
    # last, because the collectives of these ranks end with it
    "schedule_hash": "is at all_to_all_single(blocks.|all_to_all_single(blocks.0|all_to_all_single(blocks.1",
}
# stages that reduce every micro-batch would hang on another number of them
STAGES = {"num_micro_batches": (0, 1), "schedule_hash": (2,), "written_weights": (2,)}
STEP_ARGUMENTS = {"lr": 0.5, "max_grad_norm": math.inf, "grad_factor": 2.0}
# without the full counts
CHOSEN = {"step": 0, "data_cursor": 1, "loss_scale": 3, "lr": 3, "num_micro_batches": 0, "max_grad_norm": 1}


def step_differently(name: str, stage: int, rank: int, world: int) -> str:
    """One good step, then the last rank differs; returns what was wrong."""
    engine = start(RUN.with_options(zero_stage=stage))
    forward_backward(engine, RUN, 0)
    engine.step()
    other, arguments, run = rank == world - 1, {"lr": 1e-3}, RUN
    if other and name == "step":
        engine.attempted_steps += 1
    elif other and name == "data_cursor":
        engine.data_cursor = 16
    elif other and name == "loss_scale":
        engine._finalizer.scale = LossScaleState.of(dtrain.LossScale.of(8.0))
    elif other and name == "config_hash":
        engine._ballot._config_hash += 1
        finalizer = engine._finalizer
        finalizer.config_text = finalizer.config_text.replace('"max_grad_norm": 0.05', '"max_grad_norm": 0.5')
    elif other and name == "schedule_hash":
        # two equally shaped groups reduced in swapped order: gloo would sum the wrong tensors silently
        groups = engine.sharded.reducer.groups
        groups[0], groups[1] = groups[1], groups[0]
    elif other and name == "written_weights":
        with torch.no_grad():
            next(engine.module.parameters()).fill_(0.0)
    elif other and name in STEP_ARGUMENTS:
        arguments[name] = STEP_ARGUMENTS[name]
    elif other:
        run = replace(RUN, accumulation=2)
    masters = [shard.data for shard in engine.states.local_shards("master")]
    before = [master.clone() for master in masters]  # after the write, because an FP32 parameter is its master
    try:
        forward_backward(engine, run, 1)
        engine.step(**arguments)
    except DivergenceError as error:
        if name == "schedule_hash":  # found before the vote, by a rank that compares itself with the one that differs
            parts = [f"rank {world - 1} is at", *STEPS[name].split("|")]
            wrong = "".join(f"no {part!r} in {error}; " for part in parts if part not in str(error))
        else:
            wrong = differing(str(error), f"the ranks have diverged; nothing was updated|{STEPS[name]}")
        return wrong + ("" if all(map(torch.equal, masters, before)) else "updated")
    return "accepted"


def try_all(rank: int, world: int, folder: Path, config: RunConfig, stages: dict[str, list[int]]) -> dict[str, str]:
    """Returns what was wrong by case, on this rank; nothing for a mismatch that was named with both values."""
    os.chdir(folder)
    found = {f"start: {case.expected}": start_differently(case, rank, world) for case in STARTS}
    comm = connect(torch.device("cpu"))
    for group, name, value, expected in CONFIGS:
        part = replace(getattr(config, group), **{name: value}) if group else value
        own = replace(config, **{group or name: part}) if rank == world - 1 else config
        found[f"config: {expected}"] = compare(comm, own, expected)
    words = Path("samples.txt").read_text(encoding="ascii")
    found["data: one letter"] = other_data(comm, config, words[:-2] + "x" + words[-1])
    found["data: shorter"] = other_data(comm, config, words[:-SEQ_LEN])
    for name, chosen in stages.items():
        for stage in chosen:
            found[f"step: {name} at stage {stage}"] = step_differently(name, stage, rank, world)
    return found


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_a_rank_that_differs_stops_the_run(tmp_path: Path, faults: FaultCounts, world: int) -> None:
    assert set(STEPS) == set(MUST_AGREE)
    config = compose([f"run_dir={tmp_path}/run", *SMALL, "data.files=samples.txt"])
    write_samples(tmp_path)
    stages = {name: [*STAGES.get(name, range(4))] if faults.full else [CHOSEN.get(name, 2)] for name in STEPS}
    ranks = run_ranks(world, try_all, tmp_path, config, stages)
    wrong = {f"{case} on rank {rank}": what for rank, found in enumerate(ranks) for case, what in found.items() if what}
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())
    kinds = {kind: sum(case.startswith(kind) for case in ranks[0]) for kind in ("start", "config", "data", "step")}
    faults.passed("F9", len(ranks[0]), unnoticed=len(wrong), **kinds)
