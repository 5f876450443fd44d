"""The loss scale against hand-written sequences and a model of what it promises."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from dtrain.errors import ConfigError
from dtrain.precision.loss_scale import LossScale, LossScaleState


def scales(rule: LossScale, overflows: str) -> list[float]:
    """The scales after each step of ``overflows``, where ``x`` is an overflow and ``.`` a clean step."""
    state, seen = rule.start(), []
    for step in overflows:
        state = state.update(found_inf=step == "x")
        seen.append(state.scale)
    return seen


def test_backs_off_at_once_and_grows_after_the_interval() -> None:
    rule = LossScale("dynamic", init=8.0, growth_interval=2)
    assert scales(rule, "x..x....") == [4, 4, 8, 4, 4, 8, 8, 16]


def test_an_overflow_starts_the_interval_anew() -> None:
    rule = LossScale("dynamic", init=8.0, growth_interval=3)
    assert scales(rule, "..x...") == [8, 8, 4, 4, 4, 8]


def test_stays_between_floor_and_ceiling() -> None:
    rule = LossScale("dynamic", init=4.0, growth_interval=1, min=2.0, max=16.0)
    assert scales(rule, "....xxxxx.") == [8, 16, 16, 16, 8, 4, 2, 2, 2, 4]


def test_hysteresis_tolerates_overflows_until_the_scale_grows() -> None:
    rule = LossScale("dynamic", init=8.0, growth_interval=2, hysteresis=3)
    # two are tolerated, clean steps between them or not; from the third on every one backs off
    assert scales(rule, "x.xxx") == [8, 8, 8, 4, 2]
    # growth gives the tolerance back
    assert scales(rule, "xxx..xx") == [8, 8, 4, 4, 8, 8, 8]


@pytest.mark.parametrize(("rule", "constant"), [(LossScale("none"), 1.0), (LossScale("static", init=128.0), 128.0)])
@given(st.text(alphabet="x.", max_size=30))
def test_none_and_static_never_move(rule: LossScale, constant: float, steps: str) -> None:
    assert rule.start().scale == constant
    assert set(scales(rule, steps)) <= {constant}


rules = st.builds(
    LossScale,
    mode=st.just("dynamic"),
    init=st.sampled_from([1.0, 16.0, 65536.0]),
    growth_factor=st.sampled_from([1.0, 1.5, 2.0, 4.0]),
    backoff_factor=st.sampled_from([0.25, 0.5, 0.75, 1.0]),
    growth_interval=st.integers(1, 4),
    hysteresis=st.integers(1, 3),
    min=st.sampled_from([2.0**-14, 1.0]),
    max=st.sampled_from([65536.0, 2.0**24]),
)


class Machine(RuleBasedStateMachine):
    """Keeps the whole history, and derives from it what the scale must be."""

    state: LossScaleState
    rule: LossScale

    @initialize(rule=rules)
    def start(self, rule: LossScale) -> None:
        self.rule, self.state = rule, rule.start()
        self.clean, self.since_growth = 0, 0
        self.expected = rule.init

    @rule(times=st.integers(1, 4))
    def clean_steps(self, times: int) -> None:
        for _ in range(times):
            self.state = self.state.update(found_inf=False)
            self.clean += 1
            if self.clean == self.rule.growth_interval:
                self.expected = min(self.expected * self.rule.growth_factor, self.rule.max)
                self.clean = self.since_growth = 0

    @rule()
    def overflow(self) -> None:
        self.state = self.state.update(found_inf=True)
        self.since_growth += 1
        self.clean = 0
        if self.since_growth >= self.rule.hysteresis:
            self.expected = max(self.expected * self.rule.backoff_factor, self.rule.min)

    @rule()
    def save_and_restore(self) -> None:
        self.state = self.rule.start().restored(json.loads(json.dumps(self.state.to_dict())))

    @invariant()
    def is_as_expected(self) -> None:
        if hasattr(self, "state"):
            assert self.state.scale == self.expected
            assert self.rule.min <= self.state.scale <= self.rule.max


def test_any_sequence_of_steps_and_restores() -> None:
    run_state_machine_as_test(Machine, settings=settings(deadline=None, max_examples=60, stateful_step_count=30))


@pytest.mark.parametrize(
    ("dtype", "mode"), [(torch.float16, "dynamic"), (torch.bfloat16, "none"), (torch.float32, "none")]
)
def test_auto_follows_the_compute_dtype(dtype: torch.dtype, mode: str) -> None:
    assert LossScale("auto", init=32.0).resolved(dtype) == LossScale(mode, init=32.0)
    assert LossScale("dynamic").resolved(dtype) == LossScale("dynamic")


def test_of_takes_what_initialize_takes() -> None:
    record = LossScale("dynamic", init=2.0)
    assert LossScale.of(record) is record
    assert LossScale.of("none") == LossScale("none")
    for number in (8, 8.0, 2.0**30, 2.0**-30):
        assert LossScale.of(number).start().scale == number


def test_restored_keeps_to_the_rule_in_force() -> None:
    saved = LossScaleState(LossScale("dynamic", hysteresis=2), 2.0**20, 7, 1).to_dict()
    assert LossScale("dynamic", hysteresis=2).start().restored(saved).to_dict() == saved
    narrower = LossScale("dynamic", max=2.0**17)
    assert narrower.start().restored(saved).scale == 2.0**17
    for other in (LossScale("none"), LossScale("static", init=4.0)):
        assert other.start().restored(saved) == other.start()
    assert LossScale("dynamic").start().restored(LossScale("static").start().to_dict()) == LossScale("dynamic").start()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "dynamc"}, "'dynamc' is not one of auto, none, static, dynamic"),
        ({"init": 0.0}, "0 < min <= init <= max"),
        ({"init": 2.0**25}, "0 < min <= init <= max"),
        ({"min": 0.0}, "0 < min <= init <= max"),
        ({"init": math.nan}, "0 < min <= init <= max"),
        ({"init": math.inf, "max": math.inf}, "0 < min <= init <= max"),
        ({"growth_factor": 0.5}, "growth_factor >= 1"),
        ({"growth_factor": math.nan}, "growth_factor >= 1"),
        ({"growth_factor": math.inf}, "growth_factor >= 1"),
        ({"backoff_factor": 0.0}, "backoff_factor <= 1"),
        ({"backoff_factor": 1.5}, "backoff_factor <= 1"),
        ({"growth_interval": 0}, "at least 1; got 0 and 1"),
        ({"hysteresis": 0}, "at least 1; got 2000 and 0"),
    ],
)
def test_senseless_rules_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LossScale(**{"mode": "dynamic", **fields})


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, "1024", "of"])
def test_senseless_values_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="loss scale"):
        LossScale.of(value)


def test_auto_does_not_start_unresolved() -> None:
    with pytest.raises(ConfigError, match="must be resolved"):
        LossScale("auto").start()
