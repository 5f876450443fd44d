"""The loss scale against hand-written sequences and a model of what it promises."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from dtrain.config.fields import from_json
from dtrain.config.precision import LossScale
from dtrain.distributed.logging import logger
from dtrain.errors import ConfigError
from dtrain.precision.loss_scale import LossScaleState, resolve_loss_scale
from dtrain.precision.policy import PrecisionPolicy
from tests.helpers.one_rank import start


def reread(state: LossScaleState) -> LossScaleState:
    """The state as a checkpoint gives it back."""
    read = from_json(LossScaleState, json.loads(json.dumps(state.to_dict())), "loss_scale")
    read.check()
    return read


def scales(rule: LossScale, overflows: str) -> list[float]:
    """The scales after each step of ``overflows``, where ``x`` is an overflow and ``.`` a clean step."""
    state, seen = LossScaleState.of(rule), []
    for step in overflows:
        state = state.update(found_inf=step == "x")
        seen.append(state.scale)
    return seen


def calibrated(steps: list[float], **fields: Any) -> list[LossScaleState]:
    """The states before and after each step: its largest gradient, or infinity for an overflow."""
    state = LossScaleState.of(LossScale("calibrated", **fields))
    states = [state]
    for largest in steps:
        state = state.update(found_inf=math.isinf(largest), max_abs_grad=largest)
        states.append(state)
    return states


@pytest.mark.parametrize(
    ("fields", "overflows", "expected"),
    [
        # it backs off at once, and grows after the interval, which an overflow restarts
        ({"init": 8.0, "growth_interval": 2}, "x..x....", [4, 4, 8, 4, 4, 8, 8, 16]),
        ({"init": 8.0, "growth_interval": 3}, "..x...", [8, 8, 4, 4, 4, 8]),
        ({"init": 4.0, "growth_interval": 1, "min": 2.0, "max": 16.0}, "...xxxxx.", [8, 16, 16, 8, 4, 2, 2, 2, 4]),
        # two are tolerated, clean steps between them or not; from the third on every one backs off
        ({"init": 8.0, "growth_interval": 2, "hysteresis": 3}, "x.xxx", [8, 8, 8, 4, 2]),
        # growth gives the tolerance back
        ({"init": 8.0, "growth_interval": 2, "hysteresis": 3}, "xxx..xx", [8, 8, 4, 4, 8, 8, 8]),
        ({"mode": "none", "growth_interval": 1}, "x..x", [1] * 4),
        ({"mode": "static", "init": 128.0, "growth_interval": 1}, "x..x", [128] * 4),
    ],
)
def test_sequences(fields: dict[str, Any], overflows: str, expected: list[float]) -> None:
    assert scales(LossScale(**{"mode": "dynamic", **fields}), overflows) == expected


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
        self.rule, self.state = rule, LossScaleState.of(rule)
        self.clean, self.since_growth = 0, 0
        self.expected = rule.init

    @rule()
    def clean_step(self) -> None:
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
        self.state = LossScaleState.of(self.rule).restored(reread(self.state))

    @invariant()
    def is_as_expected(self) -> None:
        if hasattr(self, "state"):
            assert self.state.scale == self.expected
            assert self.rule.min <= self.state.scale <= self.rule.max


def test_any_sequence_of_steps_and_restores() -> None:
    run_state_machine_as_test(Machine, settings=settings(max_examples=30, stateful_step_count=30))


def test_a_calibrated_scale_is_chosen_once() -> None:
    states = calibrated([0.01, 0.031, 0.02, 5.0, 1e-9], calibration_steps=3)
    # 65,504 / (8 x 0.031) = 264,129, and 2^18 = 262,144
    assert [state.scale for state in states] == [65536, 65536, 65536, 2.0**18, 2.0**18, 2.0**18]
    assert [state.is_calibrating for state in states] == [True, True, True, False, False, False]
    assert states[-1].max_abs_grad == 0.031, "later gradients are not measured"
    assert states[3].describe_change_since(states[2]) == (
        "loss scale calibrated to 262144: largest gradient 3.1e-02 x 262144 x margin 8 = 6.5e+04 <= 65,504"
    )
    assert not any(after.describe_change_since(before) for after, before in zip(states[4:], states[3:], strict=False))
    assert not states[2].describe_change_since(states[1])


def test_calibration_backs_off_until_gradients_can_be_measured() -> None:
    inf = math.inf
    states = calibrated([inf, inf, 1.0, inf, 2.0], calibration_steps=2, init=2.0**16)
    assert [state.scale for state in states] == [2.0**16, 2.0**15, 2.0**14, 2.0**14, 2.0**13, 2.0**11]
    assert [state.num_measured for state in states] == [0, 0, 0, 1, 1, 2]


def test_an_overflow_lowers_a_calibrated_scale_permanently() -> None:
    states = calibrated([1.0, *[1e-3] * 3, math.inf, *[1e-3] * 5000], calibration_steps=1, growth_interval=1)
    assert states[1].scale == states[4].scale == 2.0**12
    assert {state.scale for state in states[5:]} == {2.0**11}
    assert "lowered permanently from 4096 to 2048" in states[5].describe_change_since(states[4])


def test_a_calibrated_scale_keeps_to_its_limits() -> None:
    *_, before, after = calibrated([0.0, 0.0], calibration_steps=2, init=32.0)
    assert (after.scale, after.is_calibrated) == (32.0, True)
    assert after.describe_change_since(before) == "loss scale stays 32: all gradients of the 2 measured steps were 0"
    assert calibrated([1e-30], calibration_steps=1)[-1].scale == 2.0**24
    states = calibrated([1e9], calibration_steps=1, min=1.0)
    assert states[-1].scale == 1.0
    assert "= 8e+09 > 65,504" in states[-1].describe_change_since(states[0])


@given(st.floats(2.0**-149, 2.0**120), st.sampled_from([1.0, 2.0, 3.0, 8.0, 10.5]))
def test_a_calibrated_scale_is_the_largest_power_of_two_that_fits(largest: float, margin: float) -> None:
    limits = {"min": 2.0**-200, "init": 1.0, "max": 2.0**200}
    scale = calibrated([largest], calibration_steps=1, margin=margin, **limits)[-1].scale
    assert math.frexp(scale)[0] == 0.5
    product = Fraction(largest * margin)  # rounded once
    assert product * Fraction(scale) <= 65504 < product * Fraction(scale) * 2


@given(st.lists(st.one_of(st.just(math.inf), st.just(0.0), st.floats(1e-9, 1e3)), max_size=12), st.integers(0, 12))
def test_calibration_resumes_from_a_saved_state(steps: list[float], save_after: int) -> None:
    fields: dict[str, Any] = {"calibration_steps": 4, "hysteresis": 2, "growth_interval": 2}
    states = calibrated(steps, **fields)
    rule = LossScale("calibrated", **fields)
    state = LossScaleState.of(rule).restored(reread(states[min(save_after, len(steps))]))
    for largest in steps[save_after:]:
        state = state.update(found_inf=math.isinf(largest), max_abs_grad=largest)
    assert state == states[-1]


def test_states_saved_before_there_was_calibration_are_read() -> None:
    values = {"rule": {"mode": "dynamic", "init": 65536.0}, "scale": 512.0, "clean_steps": 3, "overflows_left": 1}
    saved = from_json(LossScaleState, values, "loss_scale")
    assert LossScaleState.of(LossScale("dynamic")).restored(saved) == LossScaleState(LossScale("dynamic"), 512.0, 3, 1)
    fresh = LossScaleState.of(LossScale("calibrated"))
    assert fresh.restored(saved) == fresh
    # fewer calibration steps after a load end it at the next
    saved = calibrated([0.5] * 4, calibration_steps=9)[-1]
    state = LossScaleState.of(LossScale("calibrated", calibration_steps=2)).restored(saved)
    assert state.is_calibrating
    assert state.update(found_inf=False, max_abs_grad=0.25).scale == 2.0**13


@pytest.mark.parametrize(("dtype", "mode"), [(torch.float16, "dynamic"), (torch.bfloat16, "none")])
def test_auto_follows_the_compute_dtype(dtype: torch.dtype, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    assert resolve_loss_scale(LossScale("auto", init=32.0), dtype) == LossScale(mode, init=32.0)
    assert resolve_loss_scale(LossScale("dynamic"), dtype) == LossScale("dynamic")
    with caplog.at_level("INFO", logger=logger.name):
        assert resolve_loss_scale(LossScale("calibrated"), dtype) == LossScale("calibrated")
    assert ("'calibrated' has no effect" in caplog.text) == (mode == "none")


def test_restored_state_follows_the_current_settings() -> None:
    saved = LossScaleState(LossScale("dynamic", hysteresis=2), 2.0**20, 7, 1)
    assert LossScaleState.of(LossScale("dynamic", hysteresis=2)).restored(saved) == saved
    narrower = LossScale("dynamic", max=2.0**17)
    assert LossScaleState.of(narrower).restored(saved).scale == 2.0**17
    for other in (LossScale("none"), LossScale("static", init=4.0)):
        assert LossScaleState.of(other).restored(saved) == LossScaleState.of(other)
    fresh = LossScaleState.of(LossScale("dynamic"))
    assert fresh.restored(LossScaleState.of(LossScale("static"))) == fresh


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "dynamc"}, "LossScale.mode=dynamc is not one of .*; did you mean 'dynamic'"),
        ({"init": 0.0}, "LossScale.init=0.0 is too small; it must be above 0"),
        ({"init": 2.0**25}, "LossScale.init=33554432.0 must lie between LossScale.min=.* and LossScale.max=16777216.0"),
        ({"init": math.nan}, "LossScale.init=nan is not a finite number"),
        ({"growth_factor": 0.5}, "LossScale.growth_factor=0.5 is too small; it must be at least 1"),
        ({"backoff_factor": 1.5}, "LossScale.backoff_factor=1.5 is too large; it must be at most 1"),
        ({"growth_interval": 1.5}, "LossScale.growth_interval=1.5 is not a whole number"),
        ({"margin": 0.5}, "LossScale.margin=0.5 is too small"),
    ],
)
def test_invalid_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LossScale(**{"mode": "dynamic", **fields})


def test_of_takes_a_record_a_mode_or_a_number() -> None:
    record = LossScale("dynamic", init=2.0)
    assert LossScale.of(record) is record
    assert LossScale.of("none") == LossScale("none")
    for number in (8, 2.0**30, 2.0**-30):
        assert LossScaleState.of(LossScale.of(number)).scale == number
    for value in (0.0, -1.0, math.nan, math.inf, "1024", "of", True, None, {"mode": "dynamic"}):
        with pytest.raises(ConfigError, match=r"^loss_scale="):
            LossScale.of(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("precision", "loss_scale", "is_said"),
    [
        ("fp16", 1.0, True),
        ("fp16", 2.0, False),
        ("fp16", "calibrated", False),
        (PrecisionPolicy.named("bf16", rules={"0": "fp16"}), "none", True),
        ("bf16", "none", False),
    ],
)
def test_fp16_without_loss_scale_is_warned_of(precision: Any, loss_scale: Any, is_said: bool, caplog: Any) -> None:
    start(precision=precision, loss_scale=loss_scale)
    said = [message for message in caplog.messages if "gradients are FP16: those below 6e-8 vanish" in message]
    assert len(said) == is_said
