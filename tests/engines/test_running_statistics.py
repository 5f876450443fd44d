"""Running statistics of BatchNorm and written buffers: what belongs to no step, and rank 0's on all ranks."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dtrain.engine.parts.running_statistics import RunningStatistics
from dtrain.errors import CorruptionError, UsageError
from tests.engines.checks.skips import inputs, statistics
from tests.engines.checks.skips import start_normalized as start
from tests.engines.checks.skips import step_normalized as step
from tests.helpers.bit_flips import flip_bit
from tests.helpers.host_reads import forbidden, like_a_gpu
from tests.helpers.op_dtypes import operations_of
from tests.helpers.ranks import run_ranks


def test_what_belongs_to_no_step_stays(tmp_path: Path) -> None:
    """Statistics that the user measures again, loads or writes before a skipped step, and those of a batch given up."""
    engine = start()
    assert step(engine, 1.0).applied
    engine.save(tmp_path)
    with torch.no_grad():
        engine(inputs(engine, 7))  # in training mode
    measured = statistics(engine)
    assert not step(engine, math.nan).applied
    assert statistics(engine) == measured
    for index in engine.accumulate(range(2)):
        engine(inputs(engine, index))
        break
    given_up = statistics(engine)
    assert not step(engine, math.nan).applied
    assert statistics(engine) == given_up != measured
    engine(inputs(engine, 0))
    engine.load(tmp_path)
    loaded = statistics(engine)
    engine.backward(engine(inputs(engine, 0, math.nan)).square().mean())
    assert not engine.step().applied
    assert statistics(engine) == loaded != given_up


def test_they_are_restored_before_the_host_knows_of_the_skip() -> None:
    engine = start()
    engine.module.norm.momentum = 0.1  # torch reads the number of a mean over all batches
    reads = like_a_gpu(engine)
    step(engine, 1.0)
    before, number, x = statistics(engine), engine.attempted_steps, inputs(engine, 0, math.nan)
    engine(x.nan_to_num()).sum().item()  # a forward whose backward is given up
    with forbidden():
        engine.backward(engine(x).square().mean())
        outcome = engine.step()
    assert statistics(engine) == before
    assert number not in reads
    assert not outcome.applied


def test_a_graph_over_a_step_can_still_run() -> None:
    engine = start()
    assert step(engine, 1.0).applied
    early = engine(inputs(engine, 1)).square().mean()
    engine.backward(engine(inputs(engine, 2)).square().mean())
    engine.step()
    engine.backward(early)  # torch refuses a buffer that was written with counting
    assert engine.step().applied


def test_a_model_without_them_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for disabled in (False, True):
        if disabled:
            for name in ("before_forward", "restore"):
                monkeypatch.setattr(RunningStatistics, name, lambda *_, **__: None)
        for norms in (False, True):
            engine = start(nn.BatchNorm1d if norms else nn.LayerNorm, audit=0)
            step(engine, 1.0)
            counts.append(operations_of(partial(step, engine, 1.0)))
    without, with_norms, *expected = counts
    assert without == expected[0]
    assert 10 < with_norms - expected[1] < 50


def copies(rank: int, world: int) -> None:
    """Rank 0's statistics and written buffers reach all ranks; constants stay, so that a flipped bit is found."""
    engine = start(audit=1, ema_decay=0.9)
    model = engine.module
    step(engine, 1.0)
    table, own = model.table._version, [*statistics(engine), [model.seen.item()]]
    engine.copy_buffers()
    everyone = engine.comm.exchange_text(repr([*statistics(engine), [model.seen.item()]]))
    assert everyone == engine.comm.exchange_text(repr(own))[:1] * world
    assert (own != [*statistics(engine), [model.seen.item()]]) == (rank > 0), "control"
    assert model.table._version == table
    model.table.data.mul_(2 + rank)  # all ranks write it without counting
    engine.copy_buffers()
    assert model.table[0] == 1.0
    if rank == 1:
        model.table.mul_(2.0)
    with engine.ema():
        engine.copy_buffers()
    assert model.table[0] == 1.0
    step(engine, 1.0)
    if rank == 0:
        flip_bit(model.table, 0, 20)
    engine.copy_buffers()
    with pytest.raises(CorruptionError, match="'table'"):
        step(engine, 1.0)
    with pytest.raises(CorruptionError):
        engine.copy_buffers()


def copies_after_a_skip(rank: int, world: int) -> None:
    """As on a GPU, where each rank may read the outcome of a step at another time."""
    engine = start()
    engine._finalizer.is_synchronous = False
    output = engine(inputs(engine, 0))
    engine.backward(output.square().mean() + (output * 0.0).sum().sqrt())  # its gradient is NaN
    outcome = engine.step()
    if rank == 0:
        assert outcome.culprit is not None  # all ranks search for it
    engine.copy_buffers()
    with engine.modify_weights(), pytest.raises(UsageError, match=r"copy_buffers inside engine\.modify_weights"):
        engine.copy_buffers()
    assert outcome.culprit is not None


def without_data(rank: int, world: int) -> None:
    """A rank without a forward does not move the statistics, which torch writes without counting; audits accept it."""
    engine = start(audit=1)
    for number in range(3):
        has_data = rank == 0 or number == 0
        loss = engine(inputs(engine, 0)).square().mean() if has_data else torch.zeros((), requires_grad=True)
        engine.backward(loss, weight=float(has_data))
        engine.step()


@pytest.mark.processes
@pytest.mark.parametrize("check", [copies, copies_after_a_skip, without_data])
def test_several_ranks(check: Any) -> None:
    run_ranks(2, check, timeout=60)
