"""The moving average of the weights on one rank: writes, checkpoints and mistakes."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain.checkpoint import open_newest
from dtrain.errors import CheckpointError, ConfigError, UsageError
from dtrain.optim import average
from tests.engines.checks.optimizers import DECAY, averages_of
from tests.engines.checks.optimizers import equal as same
from tests.helpers.checkpoints import ALONE
from tests.helpers.one_rank import loss_of, start, train_step


def test_small_blocks_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for size in (average._BLOCK, 7):
        monkeypatch.setattr(average, "_BLOCK", size)
        engine = start(ema_decay=DECAY)
        assert all(train_step(engine).applied for _ in range(3))
        found.append(averages_of(engine))
    assert same(*found)


@pytest.mark.parametrize("modifies", [False, True], ids=["in_place", "modify_weights"])
def test_weights_written_before_the_first_update_are_what_is_averaged(modifies: bool) -> None:
    engine = start(ema_decay=DECAY, precision="bf16")
    with engine.modify_weights() if modifies else nullcontext(), torch.no_grad():
        engine.module[0].weight.fill_(0.25)
    written = {name: tensor.clone() for name, tensor in engine.master_state().items()}
    assert written["0.weight"].eq(0.25).all()
    assert same(averages_of(engine), written)
    assert train_step(engine).applied
    masters, expected = averages_of(engine, "master"), averages_of(engine)
    assert same(expected, {name: old + (1 - DECAY) * (masters[name] - old) for name, old in written.items()})
    with engine.modify_weights("0.weight"):  # later, the average follows by itself
        engine.module[0].weight.fill_(0.5)
    assert same(averages_of(engine), expected)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_write_to_averages_is_refused(stage: int) -> None:
    engine = start(ema_decay=DECAY, precision="bf16", zero_stage=stage)
    assert train_step(engine).applied
    before = averages_of(engine, "master")
    with pytest.raises(UsageError, match=r"'0\.bias' was written"), engine.ema(), torch.no_grad():
        engine.module[0].bias.fill_(0.25)
    assert same(averages_of(engine, "master"), before)
    assert train_step(engine).applied


def test_checkpoints_with_and_without_an_average(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain, averaged = start(), start(ema_decay=DECAY)
    for engine, name in ((plain, "plain"), (averaged, "averaged")):
        assert train_step(engine).applied
        engine.save(tmp_path / name)
    assert {tensor.kind for tensor in open_newest(tmp_path / "averaged", ALONE).tensors} >= {"ema", "master"}
    averaged.load(tmp_path / "plain")
    assert "holds no moving average of the weights; it starts from the loaded ones" in caplog.text
    assert same(averages_of(averaged), averages_of(averaged, "master"))
    with pytest.raises(CheckpointError, match=r"holds ema:\S+, of a kind .* \(ema: ema.decay\)"):
        plain.load(tmp_path / "averaged")


@pytest.mark.parametrize("decay", [1.0, -0.1, "0.9", math.nan])
def test_an_impossible_decay(decay: Any) -> None:
    with pytest.raises(ConfigError, match=r"^ema_decay="):
        start(ema_decay=decay)


def test_the_weights_come_back_after_an_error_and_nothing_is_trained_inside(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"without an average; keep one: .*ema_decay=0\.999"), start().ema():
        pass
    engine = start(ema_decay=DECAY)
    assert train_step(engine).applied
    before = averages_of(engine, "master")
    with pytest.raises(ZeroDivisionError), engine.ema():
        raise ZeroDivisionError
    assert same(averages_of(engine, "master"), before)
    with engine.ema():
        for call in (
            lambda: engine.backward(loss_of(engine)),
            engine.step,
            lambda: engine.save(tmp_path),
            lambda: engine.load(tmp_path),
            lambda: engine.ema().__enter__(),
        ):
            with pytest.raises(UsageError, match=r"inside engine.ema\(\), where the weights are averages"):
                call()
    assert same(averages_of(engine, "master"), before)
    engine.backward(loss_of(engine))
    with pytest.raises(UsageError, match=r"engine\.ema between backward and step"), engine.ema():
        pass
    assert engine.step().applied
