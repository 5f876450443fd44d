from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.cli.checks import check_config
from dtrain.config.fields import check_fields
from dtrain.config.schema import (
    GROUP_OPTIONS,
    ConstantConfig,
    CosineConfig,
    LinearConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)
from dtrain.errors import ConfigError
from dtrain.train.setup import make_schedule


def records(config: Any, prefix: str = "") -> list[tuple[str, Any]]:
    found = [(prefix, config)]
    for item in fields(config):
        if is_dataclass(getattr(config, item.name)):
            found += records(getattr(config, item.name), f"{prefix}{item.name}.")
    return found


OPTIONS = [option for options in GROUP_OPTIONS.values() for option in options.values()]
BOUNDED = [
    (record, item)
    for record in [*(record for _, record in records(RunConfig())), *(option() for option in OPTIONS)]
    for item in fields(record)
    if item.metadata.keys() & {"min", "above", "max"}
]


@pytest.mark.parametrize("schema", [RunConfig, *OPTIONS])
def test_defaults_pass_their_own_checks(schema: type[Any]) -> None:
    check_fields(schema())


def test_options_carry_their_own_name() -> None:
    for options in GROUP_OPTIONS.values():
        for name, schema in options.items():
            assert schema().name == name
    for group, options in GROUP_OPTIONS.items():
        assert type(getattr(RunConfig(), group)) in options.values()


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(BOUNDED), st.one_of(st.sampled_from([0.0, 1.0]), st.floats(min_value=-1e6, max_value=1e6)))
def test_a_value_passes_exactly_inside_its_range(bounded: tuple[Any, Any], value: float) -> None:
    record, item = bounded
    low, high = item.metadata.get("min", float("-inf")), item.metadata.get("max", float("inf"))
    changed = replace(record, **{item.name: value})
    if low <= value <= high and value > item.metadata.get("above", float("-inf")):
        check_fields(changed)
    else:
        with pytest.raises(ConfigError, match=f"{item.name}="):
            check_fields(changed)


@settings(deadline=None)
@given(st.integers(1, 100_000), st.sampled_from([CosineConfig(), LinearConfig(), ConstantConfig()]))
def test_any_number_of_steps_is_accepted_by_default(steps: int, schedule: ScheduleConfig) -> None:
    config = replace(RunConfig(), train=TrainConfig(steps=steps), schedule=schedule)
    check_config(config, 1)
    factors = make_schedule(schedule, steps)
    assert factors.factor(0) > 0
    assert schedule.resolve_warmup_steps(steps) == (20 if steps >= 200 else steps // 10)


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 2000))
def test_the_sizes_named_for_a_batch_that_does_not_divide_are_the_nearest(micro: int, world: int, batch: int) -> None:
    config = replace(RunConfig(), train=TrainConfig(micro_batch_size=micro, global_batch_size=batch))
    if batch % (micro * world) == 0:
        check_config(config, world)
        return
    with pytest.raises(ConfigError, match="does not divide") as caught:
        check_config(config, world)
    named = [int(word) for word in str(caught.value).rpartition(": ")[2].split(" or ")]
    divisible = [size for size in range(1, batch + micro * world + 1) if size % (micro * world) == 0]
    assert named == [size for size in divisible if abs(size - batch) < micro * world]
