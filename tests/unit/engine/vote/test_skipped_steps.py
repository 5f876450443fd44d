"""Weights of micro-batches, steps that are skipped, and what ends a run of them, on an engine of one process."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtrain.config.precision import LossScale
from dtrain.engine.outcome import Culprit, StepOutcome
from dtrain.engine.vote.decide import DecodedDecision
from dtrain.engine.vote.skips import SkipCounter
from dtrain.errors import NonFiniteError
from dtrain.precision.loss_scale import LossScaleState
from tests.helpers.one_rank import X, loss_of, masters, start, train_step, unchanged
from tests.helpers.vote_records import decoded, rank_records


def weighted(weights: list[Any], stage: int) -> tuple[StepOutcome, dict[str, Tensor]]:
    engine = start(zero_stage=stage)
    for x, weight in engine.accumulate(zip(X.unbind(), weights, strict=True)):
        engine.backward(loss_of(engine, x[None]), weight=weight)
    return engine.step(), masters(engine)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_weight_is_a_number_or_a_tensor_that_may_be_used_again(stage: int) -> None:
    want, wanted = weighted([1.0, 5.0, 2.0], stage)
    losses = [loss_of(start(), x[None]).item() for x in X.unbind()]
    assert want.loss == pytest.approx((losses[0] + 5 * losses[1] + 2 * losses[2]) / 8)
    for make in (torch.tensor, lambda weight: torch.tensor([float(weight)], dtype=torch.float64)):
        outcome, after = weighted([make(weight) for weight in (1, 5, 2)], stage)
        assert want == outcome
        assert all(torch.equal(after[name], wanted[name]) for name in wanted)
    engine, tokens = start(zero_stage=stage), torch.zeros(())
    for x, count in engine.accumulate(zip(X.unbind(), [1.0, 5.0, 2.0], strict=True)):
        tokens.fill_(count)
        engine.backward(loss_of(engine, x[None]), weight=tokens)
    assert engine.step() == want
    # a dummy of weight 0 does not count
    outcome, after = weighted([1.0, 0.0, 1.0], stage)
    engine = start(zero_stage=stage)
    for x in engine.accumulate([X[0], X[2]]):
        engine.backward(loss_of(engine, x[None]))
    want = engine.step()
    assert (outcome.applied, outcome.loss) == (True, pytest.approx(want.loss))
    assert outcome.grad_norm == pytest.approx(want.grad_norm)
    assert all(torch.allclose(after[name], tensor) for name, tensor in masters(engine).items())


def overflow(engine: Any) -> StepOutcome:
    """A finite loss whose gradient is not: the root of zero."""
    engine.backward((loss_of(engine) * 0).sqrt())
    return engine.step()


def test_a_scale_given_as_a_whole_number_changes_no_gradient() -> None:
    plain, scaled = start(), start(loss_scale=LossScale("static", init=1024))
    want, got = train_step(plain), train_step(scaled)
    assert (got.applied, got.loss_scale) == (True, 1024.0)
    assert got.grad_norm == pytest.approx(want.grad_norm)
    assert all(torch.allclose(masters(scaled)[name], tensor) for name, tensor in masters(plain).items())


def test_hysteresis_and_growth_and_too_many_skips_through_the_engine() -> None:
    scale = LossScale("dynamic", init=8.0, growth_interval=2, hysteresis=2)
    engine = start(max_consecutive_skips=3, loss_scale=scale)
    seen = []
    for bad in (True, False, True, True, False, False, True):
        outcome = overflow(engine) if bad else train_step(engine)
        assert outcome.applied is not bad
        seen.append(engine.loss_scale.scale)
    assert seen == [8, 8, 4, 2, 2, 4, 4]
    train_step(engine, weight=0.0)
    before = masters(engine)
    with pytest.raises(NonFiniteError) as caught:
        overflow(engine)
    message = str(caught.value)
    assert message.startswith("3 steps in a row were skipped (1 x empty, 2 x overflow); loss scale 4 -> 2; ")
    assert "last culprit: local gradient of '2.bias'[0:1] not finite (1 NaN) on rank 0, micro-batch 0. " in message
    assert "Wrong loss scale: gradients still overflow at 2 on its way down" in message
    assert unchanged(engine, before)


NONE = LossScaleState.of(LossScale("none"))
STATIC = LossScaleState.of(LossScale.of(1024.0))
DYNAMIC = LossScaleState.of(LossScale("dynamic"))
AT_FLOOR = LossScaleState.of(LossScale("dynamic", init=LossScale.min))


def outcome(reason: str | None, loss: float = 2.0, grad_norm: float = 1.0) -> StepOutcome:
    culprit = Culprit(0, 0, "reduced gradient", tensor="head") if reason == "overflow" else None
    return StepOutcome(reason is None, reason, loss, 1.0, grad_norm, 8.0, 1e-3, culprit, False)


def skip(reason: str, bad_losses: tuple[int, ...] = (0, 0)) -> DecodedDecision:
    """A skipped step with four micro-batches on each rank, ``bad_losses`` of which are not finite."""
    return decoded(reason, 2.0, 1.0, [rank_records(num_micro_batches=4, num_bad_losses=n) for n in bad_losses])


def counter(limit: int, *events: DecodedDecision | StepOutcome, scale: LossScaleState = NONE) -> SkipCounter:
    counted = SkipCounter(limit)
    for event in events:
        if isinstance(event, DecodedDecision):
            counted.skipped(outcome(event.reason), event, scale)
        else:
            counted.applied(event)
    return counted


APPLIED = [outcome(None, 2.5), outcome(None, 2.2), outcome(None, 2.1)]
RISING_LOSS = [*APPLIED, outcome(None, 7.0)]
RISING_NORM = [*APPLIED, outcome(None, 2.0, 150.0)]
EARLY = outcome(None, 0.1)  # outside of the window if 20 more are applied
FALLING = [outcome(None, -2.0), outcome(None, -4.0), outcome(None, -5.0)]
BAD, TWO_KINDS = skip("overflow"), [skip("nonfinite_loss", (2, 0)), skip("nonfinite_loss", (0, 4))]


@pytest.mark.parametrize(
    ("skips", "applied", "scale", "expected"),
    [
        ([skip("empty")] * 3, APPLIED, NONE, "Empty batches: "),
        ([skip("nonfinite_loss", (0, 1))] * 3, APPLIED, NONE, "Bad batches: 3 of 24 losses are not finite, all on"),
        (TWO_KINDS, APPLIED, DYNAMIC, "6 of 16 losses are not finite, all on ranks 0, 1, while"),
        ([skip("nonfinite_loss", (4, 4))] * 3, APPLIED, NONE, "Diverged model: every loss of every rank"),
        ([skip("nonfinite_loss", (0, 1))] * 3, RISING_LOSS, NONE, "Diverged model: the last applied steps"),
        ([BAD] * 3, RISING_NORM, STATIC, "Diverged model: the last applied steps"),
        ([BAD], [EARLY, *APPLIED], STATIC, "Diverged model: the last applied steps"),
        ([BAD], [EARLY, *APPLIED * 10], STATIC, "Wrong loss scale: the losses are finite"),
        ([BAD], FALLING, STATIC, "Wrong loss scale: the losses are finite"),  # a loss below 0 has not risen
        ([BAD] * 3, APPLIED, STATIC, "Wrong loss scale: the losses are finite"),
        ([BAD] * 3, APPLIED, DYNAMIC, "Wrong loss scale: gradients still overflow at 65536"),
        ([BAD] * 3, APPLIED, AT_FLOOR, "One operation's gradient: "),
        ([BAD] * 3, APPLIED, NONE, "One operation's gradient: "),
        ([BAD] * 2 + [skip("nonfinite_loss", (1, 0))], APPLIED, NONE, "One operation's gradient: "),
        ([BAD] + [skip("nonfinite_loss", (1, 0))] * 2, APPLIED, NONE, "Bad batches: 2 of 16 losses"),
    ],
)  # fmt: skip
def test_diagnosis_names_the_likely_cause(
    skips: list[DecodedDecision], applied: list[StepOutcome], scale: LossScaleState, expected: str
) -> None:
    assert expected in counter(99, *applied, *skips).diagnose(scale)


def test_the_limit_is_met_by_skips_in_a_row_only() -> None:
    counter(3, BAD, BAD, APPLIED[0], BAD, BAD)
    with pytest.raises(NonFiniteError) as caught:
        counter(3, APPLIED[0], BAD, skip("empty"), BAD, scale=DYNAMIC)
    message = "3 steps in a row were skipped (1 x empty, 2 x overflow); loss scale 8 -> 65536; last culprit: reduced gr"
    assert str(caught.value).startswith(message)
    with pytest.raises(NonFiniteError, match="last culprit: none"):
        counter(1, skip("empty"))


def test_reset_drops_earlier_steps() -> None:
    counted = counter(3, *RISING_LOSS, BAD, BAD)
    counted.reset()
    for _ in range(2):
        counted.skipped(outcome("overflow"), BAD, DYNAMIC)
    with pytest.raises(NonFiniteError, match="Wrong loss scale"):
        counted.skipped(outcome("overflow"), BAD, DYNAMIC)


class Planted(nn.Linear):
    """The gradient of its weight is what it is given."""

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight.float() * gradient).sum()


def test_flushed_shares_are_of_all_measured_steps(caplog: pytest.LogCaptureFixture) -> None:
    """The scale changes between the two measured steps: both count without it."""
    scale = LossScale("calibrated", init=1024.0, calibration_steps=2, growth_interval=1)
    engine = start(Planted(100, 1, bias=False), precision="fp16", loss_scale=scale)
    with caplog.at_level(logging.INFO):
        for small in (20, 40):
            gradient = torch.full((100,), 0.5)
            gradient[:small] = 2.0**-26  # lost at scale 1
            gradient[0] = 0.0
            engine.backward(engine(gradient))
            engine.step()
    # 2^-26 x 8,192 is 2^-13: kept. Not zero: 99 and 99; lost: 19 and 39
    (line,) = [line for line in caplog.messages if "FP16 flushes" in line]
    want = f"of the measured gradients FP16 flushes {58 / 198:.2%} to zero at scale 1, 0.00% at 8192"
    assert line.split("; ")[1] == want
