from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.cli.resolve import read_jobs
from dtrain.config.dump import config_from_dict, config_to_dict
from dtrain.config.growth import BatchGrowth, BatchPhase
from dtrain.config.schema import RunConfig, TrainConfig

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
def test_phases_are_sizes_by_step(sizes: dict[int, int], lengths: dict[int, int], start: int, stop: int) -> None:
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


def test_a_number_is_one_phase_and_a_mapping_in_any_order_survives_json() -> None:
    assert BatchGrowth.of(16, None, LENGTH).phases == (BatchPhase(0, 16, LENGTH),)
    assert BatchGrowth.of(16, 8, LENGTH).phases == BatchGrowth.of({0: 16}, {0: 8, 9: 8}, LENGTH).phases
    config = RunConfig(train=TrainConfig(global_batch_size={"9": 64, 0: 16}, seq_len={0: 64, 50: 128}))
    assert list(config.train.global_batch_size.items()) == [(0, 16), (9, 64)]
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config
    assert config.batch_growth.largest == config.at_largest_batch().batch_growth.at(0) == BatchPhase(0, 64, 128)
    assert RunConfig().at_largest_batch() == RunConfig()


def test_a_mapping_on_the_command_line_replaces_that_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIZE", "32")
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ntrain:\n  global_batch_size:\n    0: 16\n    1000: 64\n"
    (tmp_path / "experiment/grow.yaml").write_text(text)
    words = ["--config-dir", str(tmp_path), "experiment=grow"]
    (job,) = read_jobs([*words, 'train.seq_len={"0": 64, "50": 256}'])
    assert (job.config.train.global_batch_size, job.config.train.seq_len) == ({0: 16, 1000: 64}, {0: 64, 50: 256})
    swept = read_jobs([*words, "--multirun", "train.global_batch_size={0: 8, 500: ${oc.env:SIZE}},24"])
    assert [job.config.train.global_batch_size for job in swept] == [{0: 8, 500: 32}, 24]
