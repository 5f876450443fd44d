"""Learning-rate schedules: end points, shape and errors."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.config.schedule import WSD, AnySchedule, Constant, Cosine, Linear, Schedule
from dtrain.errors import ConfigError

steps = st.tuples(st.integers(0, 50), st.integers(1, 100)).map(lambda pair: (pair[0], pair[0] + pair[1]))
ratios = st.floats(0, 1)
decaying = st.one_of(
    st.builds(lambda s, r: Cosine(*s, min_ratio=r), steps, ratios),
    st.builds(lambda s, r: Linear(*s, min_ratio=r), steps, ratios),
    st.builds(
        lambda s, fraction, r: WSD(*s, int(fraction * (s[1] - s[0])), min_ratio=r), steps, st.floats(0, 1), ratios
    ),
)


def curve(schedule: AnySchedule, stop: int) -> list[float]:
    return [schedule.factor(step) for step in range(stop)]


@given(decaying)
def test_warms_up_linearly_then_falls_monotonically_to_its_minimum(schedule: Cosine | Linear | WSD) -> None:
    warmup, total, minimum = schedule.warmup_steps, schedule.total_steps, schedule.min_ratio
    seen = curve(schedule, total + 20)
    assert seen[:warmup] == [(step + 1) / warmup for step in range(warmup)]
    assert seen[warmup] == 1.0
    assert all(after <= before for before, after in itertools.pairwise(seen[warmup:]))
    assert all(0 <= value <= 1 for value in seen)
    assert seen[total:] == [pytest.approx(minimum, abs=1e-12)] * 20


@given(
    st.one_of(st.builds(Cosine, st.just(3), st.integers(4, 200)), st.builds(Linear, st.just(3), st.integers(4, 200)))
)
def test_no_jumps_after_warm_up(schedule: Cosine | Linear) -> None:
    length = schedule.total_steps - schedule.warmup_steps
    seen = curve(schedule, schedule.total_steps + 2)[schedule.warmup_steps :]
    steepest = math.pi / 2 / length  # of a cosine; a line's is 1 / length
    assert max(abs(a - b) for a, b in itertools.pairwise(seen)) <= (1 - schedule.min_ratio) * steepest + 1e-12


def test_curves_by_hand() -> None:
    assert curve(Constant(), 3) == [1, 1, 1]
    assert curve(Constant(4), 6) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert curve(Linear(2, 6, min_ratio=0.5), 8) == [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.5]
    assert curve(Cosine(0, 4, min_ratio=0.0), 5) == pytest.approx([1, 0.8535533905932737, 0.5, 0.14644660940672627, 0])
    assert Cosine(10, 110).factor(60) == pytest.approx(0.55)  # halfway between the peak and a tenth of it
    assert curve(WSD(2, 8, 4, min_ratio=0.2), 10) == pytest.approx([0.5, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_nulls_follow_the_run() -> None:
    assert Cosine().over(1000) == Cosine(20, 1000)
    assert Cosine().over(50) == Cosine(5, 50) == Cosine(5).over(50)
    assert Cosine(total_steps=50).over(1000) == Cosine(5, 50), "its own number of steps counts"
    assert Constant().over() == Constant(0)
    assert Constant().over(100) == Constant(10, 100)
    assert Cosine(total_steps=50).factor(4) == 1.0, "the default warm-up is five steps"


def test_wsd_without_decay_keeps_the_peak() -> None:
    assert curve(WSD(0, 5, 0), 5) == [1] * 5


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Constant(-1), "Constant.warmup_steps=-1 is too small; it must be at least 0"),
        (lambda: Cosine("5", 10), "Cosine.warmup_steps='5' is not a whole number or null"),
        (lambda: Cosine(0, 0), "Cosine.total_steps=0 is too small; it must be at least 1"),
        (lambda: Linear(11, 10), "Linear.warmup_steps=11 is more than Linear.total_steps=10"),
        (lambda: Linear(0, 10, min_ratio=1.5), "Linear.min_ratio=1.5 is too large; it must be at most 1"),
        (lambda: Cosine(0, 10, min_ratio=math.nan), "Cosine.min_ratio=nan is not a finite number"),
        (lambda: WSD(5, 10, 6), r"WSD.warmup_steps=5 \+ WSD.decay_steps=6 is more than WSD.total_steps=10"),
        (lambda: WSD(5, 10, -1), "WSD.decay_steps=-1 is too small"),
        (lambda: Cosine(5).over(), "Cosine.total_steps is null; give the number of steps over which the rate falls"),
        (lambda: WSD(None, 12, 12), r"WSD.warmup_steps=1 \+ WSD.decay_steps=12 is more"),
        (lambda: Linear().factor(0), "Linear.total_steps is null"),
    ],
)
def test_invalid_schedules_are_refused(build: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()  # type: ignore[operator]


# -- any function ------------------------------------------------------------------------------------------------------


def test_a_function_is_a_schedule() -> None:
    schedule = Schedule(lambda step: 1 / (step + 1) ** 0.5)
    assert curve(schedule, 4) == [1 / (step + 1) ** 0.5 for step in range(4)]
    assert curve(Schedule(lambda step: step), 3) == [0.0, 1.0, 2.0]
    assert schedule == Schedule(lambda step: 1 / (1 + step) ** 0.5) != Schedule(lambda step: 1 / (step + 1))
    assert json.loads(json.dumps(asdict(schedule)))["samples"][:2] == [1.0, 1 / 2**0.5]
    assert repr(schedule) != repr(Schedule(lambda step: 1 / (step + 1) ** 0.5)), "of another function"


def test_a_table_ends_with_its_own_error() -> None:
    schedule = Schedule([1.0, 0.5, 0.25].__getitem__)
    assert curve(schedule, 3) == [1.0, 0.5, 0.25]
    assert schedule.samples == (1.0, 0.5, 0.25, None, None, None)
    with pytest.raises(ConfigError, match="the schedule's function fails at step 3: IndexError: list index out of ran"):
        schedule.factor(3)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda step: math.inf, "returns inf at step 0; expected a finite number >= 0, the fraction of the peak"),
        (lambda step: math.nan, "returns nan at step 0"),
        (lambda step: 0.5 - step, "returns -0.5 at step 1"),
        (lambda step: "high", "fails at step 0: ValueError"),
        (lambda: 1.0, "fails at step 0: TypeError"),
        (0.5, r"Schedule\(0.5\) needs a function of the number of applied steps, such as"),
        (Cosine, "needs a function of the number of applied steps"),
    ],
)
def test_functions_of_something_else_are_refused(function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Schedule(function)


def test_a_function_is_checked_at_every_step() -> None:
    schedule = Schedule(lambda step: math.nan if step == 4 else 1.0)
    with pytest.raises(ConfigError, match="returns nan at step 4"):
        schedule.factor(4)
