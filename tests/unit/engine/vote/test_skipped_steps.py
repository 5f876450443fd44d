"""Weights of micro-batches, and steps that are skipped, on an engine of one process."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dtrain
from dtrain.engine.outcome import Culprit
from dtrain.errors import NonFiniteError, UsageError
from tests.helpers.one_rank import X, loss_of, masters, start, train_step, unchanged


@pytest.fixture
def engine() -> Any:
    return start()


# -- weights -----------------------------------------------------------------------------------------------------------


def weighted(weights: list[Any], stage: int = 2) -> tuple[dtrain.StepOutcome, dict[str, Tensor]]:
    engine = start(zero_stage=stage)
    for x, weight in engine.accumulate(zip(X.unbind(), weights, strict=True)):
        engine.backward(loss_of(engine, x[None]), weight=weight)
    return engine.step(), masters(engine)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("make", [float, torch.tensor, lambda w: torch.tensor([float(w)], dtype=torch.float64)])
def test_a_weight_is_a_number_or_a_tensor(make: Callable[[int], Any], stage: int) -> None:
    outcome, after = weighted([make(weight) for weight in (1, 5, 2)], stage)
    losses = [loss_of(start(), x[None]).item() for x in X.unbind()]
    assert outcome.loss == pytest.approx((losses[0] + 5 * losses[1] + 2 * losses[2]) / 8)
    want, wanted = weighted([1.0, 5.0, 2.0], stage)
    assert want == outcome
    assert all(torch.equal(after[name], wanted[name]) for name in wanted)


def test_a_weight_tensor_may_be_used_again(engine: Any) -> None:
    tokens = torch.zeros(())
    for x, count in engine.accumulate(zip(X.unbind(), [1.0, 5.0, 2.0], strict=True)):
        tokens.fill_(count)
        engine.backward(loss_of(engine, x[None]), weight=tokens)
    assert engine.step() == weighted([1.0, 5.0, 2.0])[0]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_dummy_of_weight_zero_does_not_count(stage: int) -> None:
    outcome, after = weighted([1.0, 0.0, 1.0], stage)
    engine = start(zero_stage=stage)
    for x in engine.accumulate([X[0], X[2]]):
        engine.backward(loss_of(engine, x[None]))
    want = engine.step()
    assert (outcome.applied, outcome.loss) == (True, pytest.approx(want.loss))
    assert outcome.grad_norm == pytest.approx(want.grad_norm)
    assert all(torch.allclose(after[name], tensor) for name, tensor in masters(engine).items())


def test_zero_sum_of_weights_skips_as_empty() -> None:
    engine = start(loss_scale="dynamic")
    before = masters(engine)
    outcome = train_step(engine, weight=0.0)
    assert (outcome.applied, outcome.reason, outcome.culprit) == (False, "empty", None)
    assert math.isnan(outcome.loss)
    assert unchanged(engine, before)
    assert (engine.attempted_steps, engine.applied_steps) == (1, 0)
    assert engine.loss_scale.scale == 65536.0
    assert engine.loss_scale.clean_steps == 0


# -- steps that are skipped --------------------------------------------------------------------------------------------


def overflow(engine: Any) -> dtrain.StepOutcome:
    """A finite loss whose gradient is not: the root of zero."""
    engine.backward((loss_of(engine) * 0).sqrt())
    return engine.step()


def test_an_overflow_skips_backs_off_and_names_the_tensor() -> None:
    engine = start(loss_scale=dtrain.LossScale("dynamic", init=8.0))
    before = masters(engine)
    outcome = overflow(engine)
    assert (outcome.applied, outcome.reason, outcome.loss_scale) == (False, "overflow", 8.0)
    assert outcome.culprit is not None
    # backward meets the bias of the last layer first; every gradient before it is spoilt too
    assert outcome.culprit == Culprit(0, 0, "local gradient", 0, "2.bias", 0, 1, num_inf=0, num_nan=1)
    assert str(outcome.culprit) == "local gradient of '2.bias'[0:1] not finite (1 NaN) on rank 0, micro-batch 0"
    assert unchanged(engine, before)
    assert not any(values.any() for kind in ("exp_avg", "exp_avg_sq") for values in engine._held(kind))
    assert engine.loss_scale.scale == 4.0
    assert train_step(engine).applied


def test_nonfinite_loss_skips_and_keeps_the_scale() -> None:
    engine = start(loss_scale=dtrain.LossScale("dynamic", init=8.0))
    before = masters(engine)
    for factor in engine.accumulate([1.0, math.nan, math.inf]):
        engine.backward(loss_of(engine) * factor)
    outcome = engine.step()
    assert (outcome.applied, outcome.reason) == (False, "nonfinite_loss")
    assert outcome.culprit == Culprit(0, 0, "forward loss", 1, num_nan=1, num_bad_losses=2)
    assert unchanged(engine, before)
    assert engine.loss_scale.scale == 8.0


def test_hysteresis_and_growth_through_the_engine() -> None:
    rule = dtrain.LossScale("dynamic", init=8.0, growth_interval=2, hysteresis=2)
    engine = start(loss_scale=rule)
    seen = []
    for bad in (True, False, True, True, False, False, True):
        outcome = overflow(engine) if bad else train_step(engine)
        assert outcome.applied is not bad
        seen.append(engine.loss_scale.scale)
    assert seen == [8, 8, 4, 2, 2, 4, 4]


@pytest.mark.parametrize("init", [1024, 1024.0])
@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_a_scale_given_as_a_whole_number_changes_no_gradient(mode: str, init: float) -> None:
    plain, scaled = start(), start(loss_scale=dtrain.LossScale(mode, init=init))
    want, got = train_step(plain), train_step(scaled)
    assert got.applied
    assert got.loss_scale == 1024.0
    assert got.grad_norm == pytest.approx(want.grad_norm)
    assert all(torch.allclose(masters(scaled)[name], tensor) for name, tensor in masters(plain).items())


def test_too_many_skips_end_the_run_with_a_diagnosis() -> None:
    engine = start(max_consecutive_skips=3, loss_scale=dtrain.LossScale("dynamic", init=8.0))
    overflow(engine)
    train_step(engine)
    overflow(engine)
    train_step(engine, weight=0.0)
    before = masters(engine)
    engine.backward((loss_of(engine) * 0).sqrt())
    with pytest.raises(NonFiniteError) as caught:
        engine.step()
    message = str(caught.value)
    assert message.startswith("3 steps in a row were skipped (1 x empty, 2 x overflow); loss scale 4 -> 1; ")
    assert "last culprit: local gradient of '2.bias'[0:1] not finite (1 NaN) on rank 0, micro-batch 0. " in message
    assert "Wrong loss scale: gradients still overflow at 1 on its way down" in message
    assert unchanged(engine, before)


def test_applied_step_resets_the_skip_count() -> None:
    engine = start(max_consecutive_skips=2)
    for _ in range(3):
        overflow(engine)
        train_step(engine)
    assert (engine.attempted_steps, engine.applied_steps) == (6, 3)


def bad_batch(engine: Any) -> dtrain.StepOutcome:
    for factor in engine.accumulate([1.0, math.nan, 1.0]):
        engine.backward(loss_of(engine) * factor)
    return engine.step()


def diverging(engine: Any) -> dtrain.StepOutcome:
    """Two applied steps with a rising loss, then a skipped one."""
    if engine.attempted_steps < 2:
        engine.backward(loss_of(engine) * 10.0**engine.attempted_steps)
        return engine.step()
    return overflow(engine)


def too_large_a_scale(engine: Any) -> dtrain.StepOutcome:
    engine.backward(1e3 * loss_of(engine))
    return engine.step()


FALLING, AT_FLOOR = dtrain.LossScale("dynamic", init=8.0), dtrain.LossScale("dynamic", init=8.0, min=8.0)


@pytest.mark.parametrize(
    ("loss_scale", "take_step", "cause"),
    [
        ("none", bad_batch, "Bad batches: 3 of 9 losses are not finite, all on rank 0"),
        ("none", lambda engine: train_step(engine, weight=0.0), "Empty batches"),
        ("none", diverging, "Diverged model: the last applied steps"),
        (
            1e37,
            too_large_a_scale,
            "Wrong loss scale: the losses are finite, their gradients times the static scale 1e+37",
        ),
        (FALLING, overflow, "Wrong loss scale: gradients still overflow at 1 on its way down"),
        (AT_FLOOR, overflow, "One operation's gradient"),
        ("none", overflow, "One operation's gradient"),
    ],
)
def test_the_diagnosis_names_the_cause(
    loss_scale: Any, take_step: Callable[[Any], dtrain.StepOutcome], cause: str
) -> None:
    engine = start(max_consecutive_skips=3, loss_scale=loss_scale)
    with pytest.raises(NonFiniteError, match=re.escape(cause)):
        all(take_step(engine) for _ in range(5))


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_invalid_weight_updates_nothing(weight: float) -> None:
    engine = start()
    before = masters(engine)
    engine.backward(loss_of(engine), weight=torch.tensor(weight))
    with pytest.raises(UsageError, match="the weight of micro-batch 0 of step 0 on rank 0 is negative or not finite"):
        engine.step()
    assert unchanged(engine, before)
