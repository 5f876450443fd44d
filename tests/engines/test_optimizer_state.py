"""An optimizer is data and a function: one with a single state runs through the engines without a change of dtrain."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dtrain.checkpoint import Snapshot, open_newest, save
from dtrain.engine.step import StepEngine
from dtrain.errors import CheckpointError
from tests.engines.helpers import digest, start, train_step
from tests.helpers.checkpoints import ALONE
from tests.helpers.momentum import Momentum, trained_by
from tests.helpers.one_rank import build as small_model
from tests.helpers.one_rank import loss_of
from tests.helpers.one_rank import start as start_small
from tests.helpers.one_rank import train_step as train_small
from tests.helpers.ranks import run_ranks

BF16_STATE = Momentum(lr=0.05, weight_decay=0.1, reduced=True, init=0.25)
MICRO_BATCHES = 2


def start_with(record: Momentum, engine: str, stage: int, **options: Any) -> StepEngine:
    with trained_by():
        return start(engine, stage, optimizer=record, **options)


def state_of(engine: StepEngine) -> dict[str, str]:
    return {f"{kind}:{name}": digest(t) for kind in ("master", "momentum") for name, t in engine.full_state(kind)}


def require_half_of_the_masters(engine: StepEngine) -> None:
    """The state takes half of the masters' bytes, except that it may leave out the padding of the last shards."""
    memory, formula = engine.memory(), engine.memory_formula()
    held = sum(shard.data.nbytes for shard in engine.local_shards("momentum"))
    assert held <= memory["moments"] <= memory["master"] // 2
    assert abs(formula["moments"] - formula["master"] / 2) <= 2  # each is rounded up to whole bytes


# -- the update --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["native", "ddp"])
def test_follows_torchs_momentum(engine: str) -> None:
    with trained_by():
        trained = start_small(engine=engine, optimizer=Momentum(), max_grad_norm=None)
    model = small_model()
    reference = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        assert train_small(trained).applied
        reference.zero_grad()
        loss_of(model).backward()
        reference.step()
    got = trained.master_state()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.detach(), rtol=1e-5, atol=1e-6)


def test_a_skipped_step_leaves_every_bit() -> None:
    with trained_by():
        engine = start_small(optimizer=BF16_STATE)
    assert train_small(engine).applied
    before = state_of(engine)
    engine.backward(loss_of(engine) * math.inf)
    assert not engine.step().applied
    assert state_of(engine) == before
    assert train_small(engine).applied
    assert state_of(engine) != before


# -- states are sharded, counted, saved and loaded ---------------------------------------------------------------------


def run_link(rank: int, world: int, stage: int, source: Path | None, target: Path) -> dict[str, str]:
    """Trains two steps from the checkpoint ``source``, or from the start; saves to ``target``."""
    engine = start_with(BF16_STATE, "native", stage, precision="bf16", reproducible=True)
    if source is None:
        assert all((state == 0.25).all() for _, state in engine.full_state("momentum"))
    else:
        engine.load(source)
    for _ in range(2):
        assert train_step(engine, MICRO_BATCHES).applied
    require_half_of_the_masters(engine)
    engine.save(target)
    return state_of(engine)


@pytest.mark.processes
def test_a_bf16_state_has_the_same_bits_at_every_stage_and_world_size(tmp_path: Path) -> None:
    first = [
        run_ranks(world, run_link, stage, None, tmp_path / f"{stage}-{world}")[0]
        for stage, world in [(0, 1), (0, 2), (1, 2), (2, 2), (3, 2)]
    ]
    assert all(found == first[0] for found in first)
    tensors = open_newest(tmp_path / "3-2", ALONE).tensors
    dtypes = {kind: {t.dtype for t in tensors if t.kind == kind} for kind in {t.kind for t in tensors}}
    assert dtypes["momentum"] == {torch.bfloat16}
    assert dtypes["master"] == {torch.float32}
    assert dtypes.keys() == {"master", "momentum", "buffer", "frozen"}
    # resumed by another number of ranks at another stage
    resumed = [
        run_ranks(world, run_link, stage, tmp_path / f"{source}", tmp_path / f"{stage}-{world}-resumed")[0]
        for stage, world, source in [(0, 1, "0-1"), (3, 1, "2-2"), (2, 2, "3-2"), (1, 2, "0-1")]
    ]
    assert resumed[0] != first[0]
    assert all(found == resumed[0] for found in resumed)


def run_library(rank: int, world: int, engine: str, stage: int, folder: Path) -> None:
    trained = start_with(BF16_STATE, engine, stage, precision="fp32")
    for _ in range(2):
        assert train_step(trained, MICRO_BATCHES).applied
    saved = state_of(trained)
    require_half_of_the_masters(trained)
    trained.save(folder)
    loaded = start_with(BF16_STATE, "native", 2, precision="fp32", seed=7)
    loaded.load(folder)
    assert state_of(loaded) == saved


@pytest.mark.processes
@pytest.mark.parametrize(("engine", "stage"), [("ddp", 0), ("fsdp2", 2), ("fsdp2", 3)])
def test_other_engines_hold_the_same_states(tmp_path: Path, engine: str, stage: int) -> None:
    run_ranks(2, run_library, engine, stage, tmp_path)


# -- checkpoints of another optimizer ----------------------------------------------------------------------------------


def masters_of(engine: Any) -> dict[str, Tensor]:
    state: dict[str, Tensor] = engine.master_state()
    return state


def assert_refused(engine: Any, path: Path, message: str) -> None:
    """``engine`` refuses the checkpoint, keeps its bits and trains on."""
    before = masters_of(engine)
    with pytest.raises(CheckpointError, match=message):
        engine.load(path)
    after = masters_of(engine)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert train_small(engine).applied


def test_a_state_that_the_optimizer_does_not_have_is_refused(tmp_path: Path) -> None:
    adamw = start_small()
    with trained_by():
        momentum = start_small(optimizer=Momentum())
    for engine, folder in ((adamw, "adamw"), (momentum, "momentum")):
        assert train_small(engine).applied
        engine.save(tmp_path / folder)
    unknown = r"holds {}:\S+, of a kind that this run does not know \(known: {}\); load it with the optimizer"
    assert_refused(
        adamw, tmp_path / "momentum", unknown.format("momentum", "buffer, exp_avg, exp_avg_sq, frozen, master")
    )
    assert_refused(momentum, tmp_path / "adamw", unknown.format("exp_avg", "buffer, frozen, master, momentum"))


@pytest.mark.parametrize(
    ("dropped", "message"),
    [
        (
            {"exp_avg_sq"},
            "holds no 'exp_avg_sq', the state that AdamW keeps; resume with the optimizer that it was saved",
        ),
        ({"exp_avg", "exp_avg_sq"}, "holds no 'exp_avg' and no 'exp_avg_sq', the state that AdamW keeps"),
    ],
)
def test_a_checkpoint_without_a_state_of_the_optimizer_is_refused(
    tmp_path: Path, dropped: set[str], message: str
) -> None:
    engine = start_small()
    assert train_small(engine).applied
    whole: Snapshot = engine._checkpointer._snapshot({}, {}, {})
    shards = tuple(shard for shard in whole.shards if shard.kind not in dropped)
    save(tmp_path, replace(whole, shards=shards), ALONE)
    assert_refused(engine, tmp_path, message)


def test_masters_alone_are_loaded_before_the_first_update(tmp_path: Path) -> None:
    """As of an imported model: the states have their initial values, whatever they were."""
    with trained_by():
        engine = start_small(optimizer=BF16_STATE)
    fresh: Snapshot = engine._checkpointer._snapshot({}, {}, {})
    save(tmp_path, replace(fresh, shards=tuple(shard for shard in fresh.shards if shard.kind == "master")), ALONE)
    before = state_of(engine)
    assert train_small(engine).applied
    engine.load(tmp_path)
    assert state_of(engine) == before
    assert engine.applied_steps == 0


def test_a_state_in_another_dtype_is_refused(tmp_path: Path) -> None:
    with trained_by():
        wide = start_small(optimizer=Momentum())
    with trained_by():
        reduced = start_small(optimizer=Momentum(reduced=True))
    wide.save(tmp_path)
    assert_refused(
        reduced, tmp_path, r"momentum '\S+' was saved as torch.float32, the optimizer keeps it in torch.bfloat16"
    )
