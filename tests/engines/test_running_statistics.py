"""Running statistics of BatchNorm under every engine: of applied steps only, and rank 0's on all ranks when asked."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.engine.running_statistics import RunningStatistics
from dtrain.engine.step import StepEngine
from dtrain.errors import CorruptionError, UsageError
from tests.engines.helpers import STAGES
from tests.helpers.bit_flips import flip_bit
from tests.helpers.host_reads import forbidden, like_a_gpu
from tests.helpers.ranks import run_ranks
from tests.measure.host_time import operations_of

processes = pytest.mark.processes
DIM = 4


class Net(nn.Module):
    """A norm inside a block and one after it; ``table`` is a constant, and ``seen`` is written with every input."""

    table: Tensor
    seen: Tensor

    def __init__(self, *, norms: bool = True) -> None:
        super().__init__()
        layers = [nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM) if norms else nn.LayerNorm(DIM), nn.Tanh()]
        self.blocks = nn.ModuleList([nn.Sequential(*layers)])
        self.norm = nn.BatchNorm1d(DIM, momentum=None) if norms else nn.LayerNorm(DIM)
        self.register_buffer("table", torch.linspace(0.5, 1.5, DIM))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.copy_(x.detach()[0, 0])
        for block in self.blocks:
            x = block(x)
        return self.norm(x) * self.table


def start(engine: str = "native", zero_stage: int = 0, *, norms: bool = True, **options: Any) -> StepEngine:
    torch.manual_seed(0)
    optimizer = dtrain.AdamW(lr=1e-2, compile=False)
    built = dtrain.initialize(
        Net(norms=norms),
        **{"optimizer": optimizer, "precision": "fp32", "engine": engine, "zero_stage": zero_stage, **options},
    )
    assert isinstance(built, StepEngine)
    return built


def inputs(engine: StepEngine, index: int, fault: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(engine.attempted_steps * 100 + engine.rank * 10 + index)
    return torch.randn(8, DIM, generator=generator) * fault


def step(engine: StepEngine, *faults: float) -> dtrain.StepOutcome:
    """A step with one micro-batch for each fault, a number that multiplies its inputs."""
    for index, fault in engine.accumulate(enumerate(faults)):
        engine.backward(engine(inputs(engine, index, fault)).float().square().mean())
    return engine.step()


def statistics(engine: StepEngine) -> list[list[float]]:
    norms = (module for module in engine.module.modules() if isinstance(module, nn.BatchNorm1d))
    return [buffer.flatten().tolist() for norm in norms for buffer in norm.buffers()]


def skips(engine: StepEngine) -> None:
    """A bad number on rank 0 only, in the first micro-batch; the others' statistics stay too."""
    assert step(engine, 1.0, 1.0).applied
    before = statistics(engine)
    outcome = step(engine, math.nan if engine.rank == 0 else 1.0, 1.0)
    assert (outcome.applied, outcome.reason) == (False, "nonfinite_loss")
    assert statistics(engine) == before, (engine.name, engine.options.zero_stage)
    assert step(engine, 1.0, 1.0).applied
    after = statistics(engine)
    assert all(one != other for one, other in zip(before, after, strict=True))
    assert after[2] == [4.0], "two forwards of each applied step"
    with engine.eval():
        assert engine(inputs(engine, 0)).isfinite().all()


def every_engine(rank: int, world: int) -> None:
    for name, stage in STAGES:
        skips(start(name, stage, audit=1))


@processes
def test_a_skipped_step_leaves_the_statistics() -> None:
    run_ranks(2, every_engine)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_with_recomputation_replays_and_explanations(mode: Any) -> None:
    engine = start(blocks=dtrain.Blocks(recompute=mode), audit=dtrain.Audit(every=1, replay_every=1))
    engine.explain_skips = True
    skips(engine)


def test_an_overflow_of_fp16_leaves_them() -> None:
    engine = start(precision="fp16", loss_scale=dtrain.LossScale(mode="dynamic", init=1.0))
    assert step(engine, 1.0).applied
    before = statistics(engine)
    assert not step(engine, 1e6).applied
    assert statistics(engine) == before


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
    engine.module.norm.momentum = 0.1  # type: ignore[union-attr]  # torch reads the number of a mean over all batches
    reads = like_a_gpu(engine)  # type: ignore[arg-type]
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
            for name in ("keep", "restore"):
                monkeypatch.setattr(RunningStatistics, name, lambda *_, **__: None)
        for norms in (False, True):
            engine = start(norms=norms, audit=0)
            step(engine, 1.0)
            counts.append(operations_of(partial(step, engine, 1.0)))
    without, with_norms, *expected = counts
    assert without == expected[0]
    assert 10 < with_norms - expected[1] < 50


def copies(rank: int, world: int) -> None:
    """Rank 0's statistics and written buffers reach all ranks; constants stay, so that a flipped bit is found."""
    engine = start(audit=1, ema_decay=0.9)
    model = engine.module
    assert isinstance(model, Net)
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


@processes
@pytest.mark.parametrize("check", [copies, copies_after_a_skip])
def test_all_ranks_get_the_buffers_of_rank_0(check: Any) -> None:
    run_ranks(2, check, timeout=60)
