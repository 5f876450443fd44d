"""Sizes by attempted step: which batch a step gets, and mistakes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.cli.resolve import compose, read_jobs
from dtrain.config.dump import config_from_dict, config_to_dict
from dtrain.config.growth import BatchGrowth, BatchPhase
from dtrain.config.schema import RunConfig, TrainConfig
from dtrain.errors import ConfigError

LENGTH = 64
sizes = st.dictionaries(st.integers(1, 30), st.integers(1, 8), max_size=4)
lengths = st.dictionaries(st.integers(1, 30), st.sampled_from([8, 16, 32, LENGTH]), max_size=4)


def number_at(numbers: dict[int, int], step: int) -> int:
    """The number of the last step that is reached, in the words of the documentation."""
    found = numbers[0]
    for other in range(step + 1):
        found = numbers.get(other, found)
    return found


@given(sizes, lengths, st.integers(0, 35), st.integers(0, 35))
def test_phases_are_the_sizes_of_each_step(
    sizes: dict[int, int], lengths: dict[int, int], start: int, stop: int
) -> None:
    sizes, lengths = {**sizes, 0: 3}, {**lengths, 0: 16}
    growth = BatchGrowth.of(sizes, lengths, LENGTH)
    expected = [(number_at(sizes, step), number_at(lengths, step)) for step in range(40)]
    assert [(phase.global_batch_size, phase.seq_len) for phase in map(growth.at, range(40))] == expected
    assert all(a.first_step < b.first_step for a, b in pairwise(growth.phases))
    assert all(growth.at(phase.first_step) is phase for phase in growth.phases)
    counted = [phase for count, phase in growth.between(start, stop) for _ in range(count)]
    assert counted == [growth.at(step) for step in range(start, stop)]
    assert growth.num_tokens(start, stop) == sum(LENGTH * size for size, _ in expected[start:stop])
    assert growth.largest == BatchPhase(0, max(sizes.values()), max(lengths.values()))


def test_a_number_is_one_phase() -> None:
    assert BatchGrowth.of(16, None, LENGTH).phases == (BatchPhase(0, 16, LENGTH),)
    assert BatchGrowth.of(16, 8, LENGTH).phases == BatchGrowth.of({0: 16}, {0: 8, 9: 8}, LENGTH).phases


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, r"train.seq_len=\{\} has no number for step 0, the first; write one, such as \{0: 1\}"),
        ({5: 8}, r"train.seq_len=\{5: 8\} has no number for step 0, the first; write one, such as \{0: 8,5: 8\}"),
        ({0: 8, -1: 8}, r"train.seq_len=\{0: 8,-1: 8\}: -1 is not a step; expected a whole number from 0"),
        ({0: 8, 1.5: 8}, "1.5 is not a step"),
        ({0: 8, True: 8}, "true is not a step"),
        ({0: 0}, "train.seq_len=0 from step 0 is too small; it must be at least 1"),
        ({0: 8.0}, r"train.seq_len=\{0: 8\} is not null, a whole number, or a mapping \{step: number\}"),
        ([[0, 8]], r"train.seq_len=\[\[0,8\]\] is not null, a whole number, or a mapping \{step: number\}"),
        (0, "train.seq_len=0 is too small; it must be at least 1"),
    ],
)
def test_mistakes(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("train.seq_len", "TrainConfig.seq_len")):
        TrainConfig(seq_len=value)


def test_steps_may_come_in_any_order_and_as_texts() -> None:
    assert list(TrainConfig(global_batch_size={"9": 4, 0: 2}).global_batch_size.items()) == [(0, 2), (9, 4)]


def test_a_mapping_survives_json_and_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIZE", "32")
    config = compose(["train.global_batch_size={0: 16, 1000: ${oc.env:SIZE}}", 'train.seq_len={"0": 64, "50": 256}'])
    assert (config.train.global_batch_size, config.train.seq_len) == ({0: 16, 1000: 32}, {0: 64, 50: 256})
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config


def test_a_mapping_on_the_command_line_replaces_that_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ntrain:\n  global_batch_size:\n    0: 16\n    1000: 64\n"
    (tmp_path / "experiment/grow.yaml").write_text(text)
    words = ["--config-dir", str(tmp_path), "experiment=grow"]
    for added, expected in (
        ([], {0: 16, 1000: 64}),
        (["train.global_batch_size={0: 8, 500: 32}"], {0: 8, 500: 32}),
        (["train.global_batch_size=24"], 24),
    ):
        (job,) = read_jobs([*words, *added])
        assert job.config.train.global_batch_size == expected
    swept = read_jobs([*words, "--multirun", "train.global_batch_size={0: 8},{0: 32, 9: 64}"])
    assert [job.config.train.global_batch_size for job in swept] == [{0: 8}, {0: 32, 9: 64}]


def test_a_run_at_its_largest_batch() -> None:
    config = compose(["train.global_batch_size={0: 16, 1000: 64}", "train.seq_len={0: 64, 50: 128}"])
    assert config.batch_growth.largest == config.at_largest_batch().batch_growth.at(0) == BatchPhase(0, 64, 128)
    assert RunConfig().at_largest_batch() == RunConfig()
