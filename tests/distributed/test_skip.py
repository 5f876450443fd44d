"""The loss scale on several ranks: real overflows of FP16 back it off on all until steps apply."""

from __future__ import annotations

import pytest

import dtrain
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Run, forward_backward, start

pytestmark = pytest.mark.processes

RUN = Run("transformer", accumulation=2, options={"precision": "fp16"})


def overflow_then_recover(rank: int, world: int) -> list[dtrain.StepOutcome]:
    """A scale so large that FP16 gradients overflow until it has backed off far enough."""
    engine = start(RUN.with_options(loss_scale=dtrain.LossScale(mode="dynamic", init=2.0**24)))
    outcomes = []
    for step in range(30):
        forward_backward(engine, RUN, step)
        outcomes.append(engine.step())
    return outcomes


def test_the_scale_backs_off_until_steps_apply() -> None:
    first, second = run_ranks(2, overflow_then_recover)
    applied = [outcome.applied for outcome in first]
    assert not applied[0]
    assert all(applied[applied.index(True) :])
    assert [outcome.loss_scale for outcome in first] == [outcome.loss_scale for outcome in second]
    skipped = applied.index(True)
    assert first[skipped].loss_scale == 2.0 ** (24 - skipped)
    for outcome, other in zip(first[:skipped], second[:skipped], strict=True):
        assert outcome.reason == "overflow"
        assert outcome.culprit == other.culprit
        assert outcome.culprit is not None
        assert outcome.culprit.phase == "local gradient", "in FP16 a gradient overflows where it is made"
        assert outcome.culprit.num_inf + outcome.culprit.num_nan > 0
