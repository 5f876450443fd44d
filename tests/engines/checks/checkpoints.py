"""Checkpoints: any engine on any number of ranks loads what any other saved, and training goes on during a save."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import dtrain
from dtrain.checkpoint import open_newest, storage
from dtrain.engine.step import StepEngine
from dtrain.errors import CheckpointError
from tests.engines.checks.optimizers import COMPACT, STATES, lacks, start
from tests.engines.helpers import batch, digest, fingerprints, state_digests, train_step
from tests.engines.matrix import Case, Trial, check
from tests.helpers.checkpoints import ALONE
from tests.helpers.damage import sealed

MICRO_BATCHES = 6  # of a step, on 1, 2 or 3 ranks
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3, "fp8": 2e-2}  # relative; promise P5
EXTRA = {"note": [1, "two"]}
SCALE = dtrain.LossScale("dynamic", init=256.0, growth_interval=2)
# so slow that engines that round otherwise are near each other after a step too
SCHEDULE = dtrain.Cosine(warmup_steps=10, total_steps=40)
SOURCES = (
    Case("native", 3, ranks=2),
    Case("native", 1, ranks=1),
    Case("ddp", 0, ranks=2),
    Case("fsdp2", 3, ranks=2),
    Case("deepspeed", 2, ranks=2),
)


def state_of(engine: StepEngine) -> dict[str, Any]:
    """All that must come through a checkpoint."""
    counters = (engine.attempted_steps, engine.applied_steps, engine.data_cursor)
    others = {"scale": engine.loss_scale.to_dict(), "seed": engine.seed, "run_id": engine.run_id}
    return {**state_digests(engine), "counters": counters, **others}


def train_and_save(trial: Trial) -> tuple[dict[str, Any], list[float]]:
    """Saves after an applied, a skipped and another applied step; returns the state, and the losses that follow."""
    engine = start(trial, dropout=0.1, seed=20, loss_scale=SCALE, schedule=SCHEDULE)
    for step in range(3):
        for index in engine.accumulate(range(trial.rank, MICRO_BATCHES, trial.ranks)):
            engine.backward(engine(tokens=batch(MICRO_BATCHES * step + index)), weight=float(step != 1))
        engine.data_cursor += MICRO_BATCHES
        assert engine.step().applied == (step != 1)
    assert engine.loss_scale.scale == 512.0, "it has grown"
    engine.save(trial.folder / "saved", extra=EXTRA)
    return state_of(engine), [train_step(engine, MICRO_BATCHES).loss for _ in range(2)]


@check(
    precisions=("fp32", "bf16", "fp8"),
    ranks=(2, 3, 1),
    variants={**STATES, **COMPACT},
    sources=SOURCES,
    source=train_and_save,
    unless=lacks,
)
def loads_what_any_other_saved(trial: Trial) -> None:
    engine = start(trial, dropout=0.1, seed=1, loss_scale=SCALE, schedule=SCHEDULE)
    assert engine.load(trial.folder / "saved") == EXTRA
    engine.save(trial.folder / "again")
    state, losses = trial.saved
    assert state_of(engine) == state
    if trial.rank == 0:
        assert fingerprints(trial.folder / "again") == fingerprints(trial.folder / "saved")
    found = [train_step(engine, MICRO_BATCHES).loss for _ in range(2)]
    # across engines, last bits of gradients decide how a state is rounded, and Newton-Schulz amplifies them
    is_rounded = trial.case.precision == "fp32" and trial.case.variant in ("muon", "adamw-bf16", "momentum")
    assert found == pytest.approx(losses, rel=TOLERANCE["bf16" if is_rounded else trial.case.precision])


@check(ranks=(2, 1))
def refuses_counters_that_contradict_each_other(trial: Trial) -> None:
    """On all ranks, and stays as it is."""
    engine = trial.start()
    train_step(engine, 2)
    engine.save(trial.folder)
    if trial.rank == 0:
        sealed(lambda m: m["state"]["engine_state"].update(applied_steps=99))(trial.folder / "step-00000001")
        shutil.copytree(trial.folder / "step-00000001", trial.folder / "apart/step-00000001")
    train_step(engine, 2)
    engine.comm.barrier()
    before = state_of(engine)
    for path in (trial.folder / "apart/step-00000001", trial.folder):
        with pytest.raises(CheckpointError, match="applied_steps=99; expected a whole number from 0 to attempted_"):
            engine.load(path)
    assert state_of(engine) == before
    assert (trial.folder / "bad-step-00000001-state").is_dir()


@contextmanager
def on_call(name: str, act: Callable[[], Any]) -> Iterator[None]:
    """Calls of a function of the storage module do something else first."""
    real = getattr(storage, name)

    def call(*args: Any) -> Any:
        act()
        return real(*args)

    with mock.patch.object(storage, name, call):
        yield


@contextmanager
def held_up(name: str = "create") -> Iterator[None]:
    """Calls of a function of the storage module wait until the block ends."""
    gate = threading.Event()
    with on_call(name, partial(gate.wait, 60)):
        try:
            yield
        finally:
            gate.set()


def contents(path: Path) -> dict[str, str]:
    """Digests of the tensors in a checkpoint, as ``state_digests`` gives them of an engine."""
    reader = open_newest(path, ALONE)
    return {t.label: digest(reader.read(t.kind, t.name).view(t.shape)) for t in reader.tensors}


@check(ranks=(2, 1))
def saves_the_state_at_the_start_of_a_save(trial: Trial) -> None:
    """Weights, frozen ones too, states and buffers; training has the bits of a run that does not save."""
    engine, alone = (trial.start(dropout=0.1) for _ in range(2))
    is_whole = trial.case.stage < 3 and trial.case.engine != "fsdp2"  # so its owner may overwrite a frozen weight
    for _ in range(2):  # the second into the memory of the first
        train_step(engine, 2)
        before = state_digests(engine)
        with engine.states.reads:
            frozen = dict(engine.module.named_parameters())["frozen.bias"].data
            value = frozen.clone()
        with held_up():
            path = engine.save(trial.folder, asynchronous=True)
            if is_whole:
                frozen.zero_()
            assert not path.exists()
            if is_whole:
                frozen.copy_(value)
            assert train_step(engine, 2).applied
        assert engine.wait_for_save() == path
        assert state_digests(engine) != before
        if trial.rank == 0:
            found = contents(path)
            assert {name: found[name] for name in before} == before
            assert not is_whole or found["frozen:frozen.bias"] == digest(value)
        engine.comm.barrier()
    for _ in range(4):
        train_step(alone, 2)
    assert trial.case.engine != "native" or state_digests(alone) == state_digests(engine)


@check(stages=(3,), ranks=(2,))
def a_load_restores_frozen_weights(trial: Trial) -> None:
    """Also if the library shards them, and has them unsharded when the load begins."""
    engine = trial.start()
    train_step(engine, 2)
    before = {name: value.clone() for name, value in engine.states.full_frozen()}
    path = engine.save(trial.folder)
    with engine.modify_weights("frozen"):
        for parameter in engine.module.frozen.parameters():
            parameter.mul_(2.0)
    train_step(engine, 2)
    engine.load(path)
    after = dict(engine.states.full_frozen())
    assert before
    assert all(torch.equal(after[name], value) for name, value in before.items())
