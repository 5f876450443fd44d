"""Skipped steps in a row end a run with the likeliest cause."""

from __future__ import annotations

import math

import pytest

from dtrain.config.precision import LossScale
from dtrain.engine.outcome import Culprit, StepOutcome
from dtrain.engine.vote.decide import DecodedDecision
from dtrain.engine.vote.skips import SkipCounter
from dtrain.errors import NonFiniteError
from dtrain.precision.loss_scale import LossScaleState
from tests.helpers.vote_records import decoded, rank_records

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


APPLIED = [outcome(None, 2.5), outcome(None, 2.2), outcome(None, 2.1)]
RISING_LOSS = [*APPLIED, outcome(None, 7.0)]
RISING_NORM = [*APPLIED, outcome(None, 2.0, 150.0)]


@pytest.mark.parametrize(
    ("skips", "applied", "scale", "expected"),
    [
        ([skip("empty")] * 3, APPLIED, NONE, "Empty batches: "),
        ([skip("nonfinite_loss", (0, 1))] * 3, APPLIED, NONE, "Bad batches: 3 of 24 losses"),
        ([skip("nonfinite_loss", (0, 1))] * 3, APPLIED, NONE, "all on rank 1, while"),
        ([skip("nonfinite_loss", (2, 0)), skip("nonfinite_loss", (0, 4))], APPLIED, DYNAMIC, "6 of 16 losses"),
        ([skip("nonfinite_loss", (2, 0)), skip("nonfinite_loss", (0, 4))], APPLIED, DYNAMIC, "on ranks 0, 1, while"),
        ([skip("nonfinite_loss", (4, 4))] * 3, APPLIED, NONE, "Diverged model: every loss of every rank"),
        ([skip("nonfinite_loss", (0, 1))] * 3, RISING_LOSS, NONE, "Diverged model: the last applied steps"),
        ([skip("overflow")] * 3, RISING_LOSS, DYNAMIC, "Diverged model: the last applied steps"),
        ([skip("overflow")] * 3, RISING_NORM, STATIC, "Diverged model: the last applied steps"),
        ([skip("overflow")] * 3, APPLIED, STATIC, "Wrong loss scale: the losses are finite"),
        ([skip("overflow")] * 3, APPLIED, DYNAMIC, "Wrong loss scale: gradients still overflow at 65536"),
        ([skip("overflow")] * 3, [], DYNAMIC, "Wrong loss scale: gradients still overflow at 65536"),
        ([skip("overflow")] * 3, APPLIED, AT_FLOOR, "One operation's gradient: "),
        ([skip("overflow")] * 3, APPLIED, NONE, "One operation's gradient: "),
        ([skip("overflow")] * 2 + [skip("nonfinite_loss", (1, 0))], APPLIED, NONE, "One operation's gradient: "),
        ([skip("overflow")] + [skip("nonfinite_loss", (1, 0))] * 2, APPLIED, NONE, "Bad batches: 2 of 16 losses"),
    ],
)  # fmt: skip
def test_diagnosis_names_the_likely_cause(
    skips: list[DecodedDecision], applied: list[StepOutcome], scale: LossScaleState, expected: str
) -> None:
    assert expected in counter(99, *applied, *skips).diagnose(scale)


def counter(limit: int, *events: DecodedDecision | StepOutcome, scale: LossScaleState = NONE) -> SkipCounter:
    counted = SkipCounter(limit)
    for event in events:
        if isinstance(event, DecodedDecision):
            counted.skipped(outcome(event.reason), event, scale)
        else:
            counted.applied(event)
    return counted


def test_the_limit_is_met_by_skips_in_a_row_only() -> None:
    bad = skip("overflow")
    counter(3, bad, bad, APPLIED[0], bad, bad)
    with pytest.raises(NonFiniteError) as caught:
        counter(3, APPLIED[0], bad, skip("empty"), bad, scale=DYNAMIC)
    assert str(caught.value).startswith(
        "3 steps in a row were skipped (1 x empty, 2 x overflow); loss scale 8 -> 65536; last culprit: reduced gradient"
    )
    assert str(caught.value).endswith(counter(99, APPLIED[0], bad, skip("empty"), bad).diagnose(DYNAMIC))


def test_a_skip_without_a_culprit_says_so() -> None:
    with pytest.raises(NonFiniteError, match="last culprit: none"):
        counter(1, skip("empty"))


def test_reset_drops_earlier_steps() -> None:
    counted = counter(3, *RISING_LOSS, skip("overflow"), skip("overflow"))
    counted.reset()
    for _ in range(2):
        counted.skipped(outcome("overflow"), skip("overflow"), DYNAMIC)
    with pytest.raises(NonFiniteError, match="Wrong loss scale"):
        counted.skipped(outcome("overflow"), skip("overflow"), DYNAMIC)


def test_diagnosis_uses_the_latest_applied_steps_only() -> None:
    early = [outcome(None, 0.1)]  # outside the window
    with pytest.raises(NonFiniteError, match="Wrong loss scale"):
        counter(1, *early, *APPLIED * 10, skip("overflow"), scale=STATIC)
    with pytest.raises(NonFiniteError, match="Diverged model"):
        counter(1, *early, *APPLIED, skip("overflow"), scale=STATIC)


def test_a_loss_below_zero_is_no_sign_of_divergence() -> None:
    falling = [outcome(None, -2.0), outcome(None, -4.0), outcome(None, -5.0)]
    assert "Wrong loss scale" in counter(99, *falling, skip("overflow")).diagnose(STATIC)
    assert math.isfinite(falling[0].loss)
