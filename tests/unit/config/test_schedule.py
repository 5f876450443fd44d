"""Learning-rate schedules: end points, shape and errors."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.config.schedule import WSD, Constant, Cosine, Linear, Schedule
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


def curve(schedule: Schedule, stop: int) -> list[float]:
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
