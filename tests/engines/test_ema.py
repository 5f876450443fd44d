"""The moving average of the weights is a state like any other, and ``engine.ema`` puts it in their place."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dtrain.checkpoint import open_newest
from dtrain.engine.step import StepEngine
from dtrain.errors import CheckpointError, ConfigError, UsageError
from dtrain.optim import average
from tests.engines.helpers import batch, computed, digest, start, train_step
from tests.helpers.checkpoints import ALONE
from tests.helpers.one_rank import loss_of
from tests.helpers.one_rank import start as start_small
from tests.helpers.one_rank import train_step as train_small
from tests.helpers.ranks import run_ranks

DECAY = 0.9
LIBRARIES = [("native", 2), ("ddp", 0), ("fsdp2", 3), ("deepspeed", 2)]


def averages_of(engine: StepEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.full_state("ema")}


def advanced(averages: dict[str, Tensor], engine: StepEngine) -> dict[str, Tensor]:
    """The averages after an applied step, in a plain loop over whole tensors."""
    masters = dict(engine.full_state("master"))
    return {name: old + (1 - DECAY) * (masters[name] - old) for name, old in averages.items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def follow(rank: int, world: int, engine: str, stage: int, precision: str) -> None:
    trained = start(engine, stage, precision=precision, ema_decay=DECAY)
    expected = {name: tensor.clone() for name, tensor in trained.full_state("master")}
    assert same(averages_of(trained), expected)
    for _ in range(3):
        assert train_step(trained, 2).applied
        expected = advanced(expected, trained)
    assert same(averages_of(trained), expected)
    for index in trained.accumulate([rank]):
        trained.backward(trained(tokens=batch(index)) * math.inf)
    assert not trained.step().applied
    assert same(averages_of(trained), expected)
    before, loss = dict(trained.full_state("master")), computed(trained)
    before = {name: tensor.clone() for name, tensor in before.items()}
    with trained.ema():
        assert same(dict(trained.full_state("master")), expected)
        assert not torch.equal(computed(trained), loss)
    assert same(dict(trained.full_state("master")), before)
    assert same(averages_of(trained), expected)
    assert torch.equal(computed(trained), loss)
    assert train_step(trained, 2).applied
    memory, formula = trained.memory(), trained.memory_formula()
    held = 3 * sum(shard.data.nbytes for shard in trained.local_shards("ema"))
    assert held <= memory["moments"] <= 3 * memory["master"]  # without the padding of the last shards
    assert abs(formula["moments"] - 3 * formula["master"]) <= 12  # each is rounded up to whole bytes


@pytest.mark.parametrize(("engine", "stage"), LIBRARIES)
@pytest.mark.processes
def test_follows_applied_steps_and_is_swapped_in(engine: str, stage: int) -> None:
    run_ranks(1, follow, engine, stage, "fp32")  # in a process of its own: libraries leave a process group


@pytest.mark.processes
@pytest.mark.parametrize(
    ("engine", "stage", "precision"),
    [("native", 1, "fp32"), ("native", 3, "bf16"), ("ddp", 0, "bf16"), ("fsdp2", 2, "fp32")],
)
def test_two_ranks(engine: str, stage: int, precision: str) -> None:
    run_ranks(2, follow, engine, stage, precision)


def bits(rank: int, world: int, stage: int) -> dict[str, str]:
    engine = start("native", stage, precision="bf16", reproducible=True, ema_decay=DECAY)
    for _ in range(3):
        assert train_step(engine, 6).applied
    return {name: digest(tensor) for name, tensor in engine.full_state("ema")}


@pytest.mark.processes
def test_any_stage_and_number_of_ranks_gives_the_same_bits() -> None:
    found = [run_ranks(world, bits, stage)[0] for world, stage in [(1, 0), (2, 2), (3, 3), (2, 0)]]
    assert all(other == found[0] for other in found[1:])


def test_small_blocks_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for size in (average._BLOCK, 7):
        monkeypatch.setattr(average, "_BLOCK", size)
        engine = start_small(ema_decay=DECAY)
        assert all(train_small(engine).applied for _ in range(3))
        found.append(averages_of(engine))
    assert same(*found)


# -- writes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("modifies", [False, True], ids=["in_place", "modify_weights"])
def test_weights_written_before_the_first_update_are_what_is_averaged(modifies: bool) -> None:
    engine = start_small(ema_decay=DECAY, precision="bf16")
    with engine.modify_weights() if modifies else nullcontext(), torch.no_grad():
        engine.module[0].weight.fill_(0.25)
    written = {name: tensor.clone() for name, tensor in engine.master_state().items()}
    assert written["0.weight"].eq(0.25).all()
    assert same(averages_of(engine), written)
    assert train_small(engine).applied
    expected = averages_of(engine)
    assert same(expected, advanced(written, engine))
    with engine.modify_weights("0.weight"):  # later, the average follows by itself
        engine.module[0].weight.fill_(0.5)
    assert same(averages_of(engine), expected)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_write_to_averages_is_refused(stage: int) -> None:
    engine = start_small(ema_decay=DECAY, precision="bf16", zero_stage=stage)
    assert train_small(engine).applied
    before = {name: tensor.clone() for name, tensor in engine.full_state("master")}
    with pytest.raises(UsageError, match=r"'0\.bias' was written"), engine.ema(), torch.no_grad():
        engine.module[0].bias.fill_(0.25)
    assert same(dict(engine.full_state("master")), before)
    assert train_small(engine).applied


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_is_saved_and_loaded_by_another_engine(tmp_path: Path) -> None:
    engine = start_small(ema_decay=DECAY)
    assert all(train_small(engine).applied for _ in range(2))
    engine.save(tmp_path)
    assert {tensor.kind for tensor in open_newest(tmp_path, ALONE).tensors} >= {"ema", "master"}
    other = start_small(engine="ddp", ema_decay=DECAY)
    other.load(tmp_path)
    assert same(averages_of(other), averages_of(engine))


def test_a_checkpoint_without_an_average_starts_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = start_small()
    assert train_small(plain).applied
    plain.save(tmp_path)
    engine = start_small(ema_decay=DECAY)
    engine.load(tmp_path)
    assert "holds no moving average of the weights; it starts from the loaded ones" in caplog.text
    assert same(averages_of(engine), dict(engine.full_state("master")))


def test_a_run_without_an_average_refuses_one(tmp_path: Path) -> None:
    engine = start_small(ema_decay=DECAY)
    engine.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds ema:\S+, of a kind .* \(ema: ema.decay\)"):
        start_small().load(tmp_path)


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_without_an_average() -> None:
    engine = start_small()
    with pytest.raises(UsageError, match=r"without an average; keep one: .*ema_decay=0\.999"), engine.ema():
        pass


@pytest.mark.parametrize("decay", [1.5, 1.0, -0.1, "0.9", math.nan])
def test_an_impossible_decay(decay: Any) -> None:
    with pytest.raises(ConfigError, match=r"^ema_decay="):
        start_small(ema_decay=decay)


def test_the_weights_come_back_after_an_error_and_nothing_is_trained_inside(tmp_path: Path) -> None:
    engine = start_small(ema_decay=DECAY)
    assert train_small(engine).applied
    before = {name: tensor.clone() for name, tensor in engine.full_state("master")}
    with pytest.raises(ZeroDivisionError), engine.ema():
        raise ZeroDivisionError
    assert same(dict(engine.full_state("master")), before)
    calls = [
        lambda: engine.backward(loss_of(engine)),
        engine.step,
        lambda: engine.save(tmp_path),
        lambda: engine.load(tmp_path),
        lambda: engine.ema().__enter__(),
    ]
    with engine.ema():
        for call in calls:
            with pytest.raises(UsageError, match=r"inside engine.ema\(\), where the weights are averages"):
                call()
    assert same(dict(engine.full_state("master")), before)
    engine.backward(loss_of(engine))
    with pytest.raises(UsageError, match=r"engine\.ema between backward and step"), engine.ema():
        pass
    assert engine.step().applied
