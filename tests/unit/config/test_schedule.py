from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict, replace

from hypothesis import given
from hypothesis import strategies as st

from dtrain.cli.checks import check_config
from dtrain.config.schedule import WSD, AnySchedule, Constant, Cosine, Linear, Schedule
from dtrain.config.schema import RunConfig, TrainConfig

steps = st.tuples(st.integers(0, 50), st.integers(1, 100)).map(lambda pair: (pair[0], pair[0] + pair[1]))
ratios = st.floats(0, 1)
decaying = st.one_of(
    st.builds(lambda s, r: Cosine(*s, min_ratio=r), steps, ratios),
    st.builds(lambda s, r: Linear(*s, min_ratio=r), steps, ratios),
    st.builds(lambda s, share, r: WSD(*s, int(share * (s[1] - s[0])), min_ratio=r), steps, st.floats(0, 1), ratios),
)


def curve(schedule: AnySchedule, stop: int) -> list[float]:
    return [schedule.factor(step) for step in range(stop)]


@given(decaying)
def test_warms_up_linearly_then_falls_monotonically_to_its_minimum(schedule: Cosine | Linear | WSD) -> None:
    warmup, total, minimum = schedule.warmup_steps, schedule.total_steps, schedule.min_ratio
    seen = curve(schedule, total + 20)
    assert seen[:warmup] == [(step + 1) / warmup for step in range(warmup)]
    assert seen[warmup] == 1.0
    falls = [before - after for before, after in itertools.pairwise(seen[warmup:])]
    assert all(fall >= 0 for fall in falls)
    assert all(0 <= value <= 1 for value in seen)
    assert all(abs(value - minimum) < 1e-12 for value in seen[total:])
    if not isinstance(schedule, WSD):  # no jump: a cosine is steepest, a line's slope is 1 / length
        assert max(falls) <= (1 - minimum) * math.pi / 2 / (total - warmup) + 1e-12


def test_curves_by_hand() -> None:
    def is_close(schedule: AnySchedule, expected: list[float]) -> bool:
        return all(map(math.isclose, curve(schedule, len(expected)), expected))

    assert curve(Constant(), 3) == [1, 1, 1]
    assert curve(Constant(4), 6) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert curve(Linear(2, 6, min_ratio=0.5), 8) == [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.5]
    assert is_close(Cosine(0, 4, min_ratio=0.0), [1, 0.8535533905932737, 0.5, 0.14644660940672627, 0])
    assert math.isclose(Cosine(10, 110).factor(60), 0.55)  # halfway between the peak and a tenth of it
    assert is_close(WSD(2, 8, 4, min_ratio=0.2), [0.5, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])
    assert curve(WSD(0, 5, 0), 5) == [1] * 5


def test_nulls_follow_the_run() -> None:
    assert Cosine().over(1000) == Cosine(20, 1000)
    assert Cosine().over(50) == Cosine(5, 50) == Cosine(5).over(50)
    assert Cosine(total_steps=50).over(1000) == Cosine(5, 50), "its own number of steps counts"
    for steps in (1, 9, 10, 199, 200, 100_000):  # which any run may have
        for schedule in (Cosine(), Linear(), Constant()):
            assert schedule.over(steps).warmup_steps == (20 if steps >= 200 else steps // 10)
            check_config(replace(RunConfig(), train=TrainConfig(steps=steps), schedule=schedule), 1)
    assert Constant().over() == Constant(0)
    assert Constant().over(100) == Constant(10, 100)
    assert Cosine(total_steps=50).factor(4) == 1.0, "the default warm-up is five steps"


def test_a_function_or_a_table_is_a_schedule() -> None:
    schedule = Schedule(lambda step: 1 / (step + 1) ** 0.5)
    assert curve(schedule, 4) == [1 / (step + 1) ** 0.5 for step in range(4)]
    assert curve(Schedule(lambda step: step), 3) == [0.0, 1.0, 2.0]
    assert schedule == Schedule(lambda step: 1 / (1 + step) ** 0.5) != Schedule(lambda step: 1 / (step + 1))
    assert json.loads(json.dumps(asdict(schedule)))["samples"][:2] == [1.0, 1 / 2**0.5]
    assert repr(schedule) != repr(Schedule(lambda step: 1 / (step + 1) ** 0.5)), "of another function"
    assert Schedule([1.0, 0.5, 0.25].__getitem__).samples == (1.0, 0.5, 0.25, None, None, None)
