"""A stop while a save fails, and the samples of a run that is killed and resumed (F3, P6).

``test_kills`` and ``test_stops`` have kills and stops anywhere.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.fault_counts import FaultCounts
from tests.helpers.launch import SMALL, curve, log_of, newest_step, record_of, train
from tests.helpers.mishap import Mishap, recording

STEPS = 12


@pytest.mark.exhaustive
def test_stopped_during_a_failing_save(tmp_path: Path, data: str) -> None:
    """The signal arrives while a thread saves step 4, which then fails: the current step is saved."""
    run_dir = tmp_path / "run"
    assert train(run_dir, *SMALL, data, env=Mishap("write", 15, "stop and fail").env()) == [75]
    stopped = newest_step(run_dir)
    assert stopped == curve(run_dir)[-1]["step"] > 4
    assert "a save failed, but a stop is requested" in log_of(run_dir)
    assert "Input/output error (errno 5)" in log_of(run_dir)
    for run in (run_dir, tmp_path / "whole"):
        assert train(run, *SMALL, data) == [0]
    record, whole = record_of(run_dir), record_of(tmp_path / "whole")
    # a stop does not wait for a validation that is due at its step
    validated = [one for one in whole.curve if one["step"] != stopped or "val_loss" not in one]
    assert record == replace(whole, curve=validated)
    assert record.step == STEPS
    assert record.state["engine_state"]["loss_scale"]["scale"] > 1024  # it did grow


def _samples(file: Path) -> dict[int, Counter[str]]:
    """Returns step -> samples trained on, from one process."""
    steps: dict[int, Counter[str]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        step, number = line.split()
        steps.setdefault(int(step), Counter())[number] += 1
    return steps


def test_each_sample_is_used_once_an_epoch_despite_kills(tmp_path: Path, data: str, faults: FaultCounts) -> None:
    """Two ranks, one is killed; then one, which is killed; then three: the same samples in the same steps."""
    starts = [(2, Mishap("vote", 6, rank=1), None), (1, Mishap("update", 5), None), (3, None, [0, 0, 0])]
    steps: dict[int, Counter[str]] = {}
    for number, (world, mishap, expected) in enumerate(starts):
        file = tmp_path / f"samples-{number}"
        env = recording(file) | (mishap.env() if mishap else {})
        assert train(tmp_path / "run", *SMALL, data, world=world, env=env) == expected
        trained = _samples(file)
        steps = {step: steps[step] for step in steps if step < min(trained)} | trained
    assert train(tmp_path / "whole", *SMALL, data, env=recording(tmp_path / "samples")) == [0]
    assert steps == _samples(tmp_path / "samples")
    assert sorted(steps) == list(range(STEPS))
    assert set(sum((steps[step] for step in range(6)), Counter()).values()) == {1}
    all_used = sum(steps.values(), Counter())  # 72 samples: an epoch of 41, and 31 of the next
    assert Counter(all_used.values()) == {1: 41 - 31, 2: 31}
    kills = sum(mishap is not None for _, mishap, _ in starts)
    faults.passed("P6", sum(all_used.values()), kills=kills, numbers_of_ranks=len(starts))
