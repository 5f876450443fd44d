"""Whatever ends a run, and wherever, the run that goes on has the bits of the run that was never ended."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.launch import (
    SMALL,
    Record,
    checkpoints,
    curve,
    newest_step,
    python,
    record_of,
    said,
    torchrun,
    train,
    write_samples,
)
from tests.helpers.mishap import PLACES, Mishap, recording

STEPS = 12


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_samples(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, data: str) -> Record:
    """The run on one rank that was never ended."""
    return _never_ended(tmp_path_factory.mktemp("whole") / "run", data, world=1)


@pytest.fixture(scope="module")
def whole_on_two(tmp_path_factory: pytest.TempPathFactory, data: str) -> Record:
    """The run on two ranks that was never ended; its sums have another order than on one."""
    return _never_ended(tmp_path_factory.mktemp("whole2") / "run", data, world=2)


def _never_ended(run_dir: Path, data: str, world: int) -> Record:
    assert train(run_dir, *SMALL, data, world=world) == [0] * world
    record = record_of(run_dir)
    assert record.step == STEPS
    assert record.state["engine_state"]["loss_scale"]["scale"] > 1024  # it did grow
    return record


def _last_reported(run_dir: Path) -> int:
    """The last checkpoint that the run said it had saved."""
    steps = re.findall(r"saved \S+step-(\d+) ", said(run_dir))
    return int(steps[-1]) if steps else 0


def test_dropout_is_at_work(tmp_path: Path, data: str, whole: Record) -> None:
    """The control of this file: with other random numbers the bits are others."""
    assert train(tmp_path / "run", *SMALL, data, "model.dropout=0") == [0]
    assert record_of(tmp_path / "run").tensors != whole.tensors


# calls of the place until the process dies, from its start; a step has 6 micro-batches, a checkpoint every 4 steps has
# some 30 writes
INSTANTS = [
    ("forward", 39),
    ("backward", 63),
    ("vote", 1),
    ("update", 11),
    ("gather", 9),
    ("metrics", 5),
    ("validation", 1),
    ("create", 3),
    ("write", 1),
    ("write", 40),
    ("sync", 3),
    ("rename", 2),
    ("sync_directory", 7),
    ("summary", 1),
]


@pytest.mark.parametrize(("place", "count"), INSTANTS)
def test_killed_at_one_place(tmp_path: Path, data: str, whole: Record, place: str, count: int) -> None:
    run_dir = tmp_path / "run"
    assert train(run_dir, *SMALL, data, env=Mishap(place, count).env()) is None
    assert newest_step(run_dir) >= _last_reported(run_dir)
    assert train(run_dir, *SMALL, data) == [0]
    assert record_of(run_dir) == whole
    assert checkpoints(run_dir) == ["step-00000008", "step-00000012"]


# the thread that saves step 4 stands still there while training goes on, until the process dies
IN_THE_THREAD = [("create", 2), ("write", 15), ("sync", 3), ("rename", 1), ("sync_directory", 6)]


@pytest.mark.parametrize(("place", "count"), IN_THE_THREAD)
def test_killed_in_a_save_while_training_goes_on(
    tmp_path: Path, data: str, whole: Record, place: str, count: int
) -> None:
    run_dir = tmp_path / "run"
    assert train(run_dir, *SMALL, data, env=Mishap(place, count, "linger").env()) is None
    assert curve(run_dir)[-1]["step"] > 4
    assert newest_step(run_dir) == (4 if place == "sync_directory" else 0), "the commit is the rename"
    assert "saved" not in said(run_dir)
    assert train(run_dir, *SMALL, data) == [0]
    assert record_of(run_dir) == whole
    assert checkpoints(run_dir) == ["step-00000008", "step-00000012"]


def test_killed_in_a_reduction(tmp_path: Path, data: str, whole_on_two: Record) -> None:
    run_dir = tmp_path / "run"
    assert train(run_dir, *SMALL, data, world=2, env=Mishap("reduction", 70, rank=1).env()) is None
    assert newest_step(run_dir) >= _last_reported(run_dir)
    assert 0 < curve(run_dir)[-1]["step"] < STEPS
    assert train(run_dir, *SMALL, data, world=2) == [0, 0]
    assert record_of(run_dir) == whole_on_two


def test_every_place_is_covered() -> None:
    assert {place for place, _ in INSTANTS} | {"reduction"} == set(PLACES)


@pytest.mark.parametrize("world", [1, 2])
def test_killed_at_random_instants(tmp_path: Path, data: str, whole: Record, whole_on_two: Record, world: int) -> None:
    """The last rank is killed again and again until the run gets to its end."""
    began = time.monotonic()
    assert train(tmp_path / "clock", *SMALL, data, world=world) == [0] * world
    duration = time.monotonic() - began
    run_dir, seed = tmp_path / "run", 100 * world
    print(f"seed {seed}, duration {duration}")  # shown where it fails
    rng = random.Random(seed)
    # the first death is counted, so that there is one on any machine
    mishap = Mishap("vote", rng.randint(2, STEPS), rank=world - 1)
    assert train(run_dir, *SMALL, data, world=world, env=mishap.env()) is None
    deaths = 1
    while train(run_dir, *SMALL, data, world=world, alarm=rng.uniform(0.1, 0.6) * duration) is None:
        deaths += 1
        assert newest_step(run_dir) >= _last_reported(run_dir)
        if deaths == 6:
            assert train(run_dir, *SMALL, data, world=world) == [0] * world
            break
    assert record_of(run_dir) == (whole if world == 1 else whole_on_two)


# -- under torchrun ----------------------------------------------------------------------------------------------------


def test_all_processes_killed(tmp_path: Path, data: str, whole_on_two: Record) -> None:
    run_dir = tmp_path / "run"
    command = [*SMALL, data, f"run_dir={run_dir}"]
    # all ranks hang between backward and vote, so that they die before the end however slow this process is
    with torchrun(tmp_path, *command, env=Mishap("vote", 7, "sleep").env()) as job:
        job.wait_for_step(run_dir, 6)
        job.wait_until(lambda: newest_step(run_dir) == 4)  # saved by a thread
        job.kill()
        assert job.wait() == -signal.SIGKILL
        assert job.gone(2.0)
    assert newest_step(run_dir) == 4
    with torchrun(tmp_path, *command) as job:
        assert job.wait() == 0, job.said
        assert "step-00000004 (saved" in job.said
    assert record_of(run_dir) == whole_on_two


def test_one_rank_killed_in_a_save(tmp_path: Path, data: str, whole_on_two: Record) -> None:
    run_dir = tmp_path / "run"
    with torchrun(tmp_path, *SMALL, data, f"run_dir={run_dir}", env=Mishap("create", 2, rank=1).env()) as job:
        assert job.wait() == 1
        assert "exitcode  : -9" in job.said
        assert job.gone(2.0)
    assert newest_step(run_dir) == 4
    assert len(checkpoints(run_dir)) == 2  # the other one was under way: rank 1 has not opened its file
    assert train(run_dir, *SMALL, data, world=2) == [0, 0]
    assert record_of(run_dir) == whole_on_two


# -- stop signals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "world"), [("SIGTERM", 1), ("SIGINT", 1), ("SIGUSR1", 1), ("SIGUSR1", 2)])
def test_stopped_in_a_step(
    tmp_path: Path, data: str, whole: Record, whole_on_two: Record, name: str, world: int
) -> None:
    """A signal to one rank in the middle of step 7: all ranks end it and save it."""
    run_dir = tmp_path / "run"
    count = 6 * 6 // world + 2 // world + 1  # after six steps and one validation
    mishap = Mishap("forward", count, name, rank=world - 1)
    assert train(run_dir, *SMALL, data, world=world, env=mishap.env()) == [75] * world
    assert newest_step(run_dir) == 7
    assert curve(run_dir)[-1]["step"] == 7
    assert "stopped at step 7" in said(run_dir)
    assert train(run_dir, *SMALL, data, world=world) == [0] * world
    assert record_of(run_dir) == (whole if world == 1 else whole_on_two)


def test_stopped_while_a_save_is_under_way(tmp_path: Path, data: str, whole: Record) -> None:
    """The signal comes while a thread saves step 4: that save is committed, then the step that has ended."""
    run_dir = tmp_path / "run"
    assert train(run_dir, *SMALL, data, env=Mishap("create", 2, "SIGTERM").env()) == [75]
    steps = [int(name.removeprefix("step-")) for name in checkpoints(run_dir)]
    assert steps == [4, curve(run_dir)[-1]["step"]]
    assert steps[1] > 4
    assert train(run_dir, *SMALL, data) == [0]
    assert record_of(run_dir) == whole


def test_stopped_while_a_save_fails(tmp_path: Path, data: str, whole: Record) -> None:
    """The signal comes while a thread saves step 4, and then that save fails: the step that has ended is saved."""
    run_dir = tmp_path / "run"
    assert train(run_dir, *SMALL, data, env=Mishap("write", 15, "stop and fail").env()) == [75]
    assert newest_step(run_dir) == curve(run_dir)[-1]["step"] > 4
    assert "the run goes on to save it although a save failed" in said(run_dir)
    assert "Input/output error (errno 5)" in said(run_dir)
    assert train(run_dir, *SMALL, data) == [0]
    assert record_of(run_dir) == whole


def test_second_signal_ends_a_step_that_hangs(tmp_path: Path, data: str, whole: Record) -> None:
    run_dir = tmp_path / "run"
    with python(tmp_path, *SMALL, data, f"run_dir={run_dir}", env=Mishap("vote", 6, "sleep").env()) as job:
        job.wait_for_step(run_dir, 5)
        job.wait_until(lambda: newest_step(run_dir) == 4)  # saved by a thread
        os.kill(job.pid, signal.SIGTERM)
        time.sleep(1.2)  # before one second is over it counts as a copy of the first
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait(5) == -signal.SIGTERM
    assert newest_step(run_dir) == 4
    assert train(run_dir, *SMALL, data) == [0]
    assert record_of(run_dir) == whole


# -- the data ----------------------------------------------------------------------------------------------------------


def _samples(file: Path) -> dict[int, Counter[str]]:
    """What was trained on in each step of one start."""
    steps: dict[int, Counter[str]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        step, number = line.split()
        steps.setdefault(int(step), Counter())[number] += 1
    return steps


def test_each_sample_once_an_epoch_whatever_dies(tmp_path: Path, data: str) -> None:
    """Two ranks, of which one dies; then one, which dies; then three: the same samples in the same steps."""
    starts = [
        (2, Mishap("vote", 6, rank=1), None),
        (1, Mishap("update", 5), None),
        (3, None, [0, 0, 0]),
    ]
    steps: dict[int, Counter[str]] = {}
    for number, (world, mishap, expected) in enumerate(starts):
        file = tmp_path / f"samples-{number}"
        env = recording(file) | (mishap.env() if mishap else {})
        assert train(tmp_path / "run", *SMALL, data, world=world, env=env) == expected
        lasting = _samples(file)
        steps = {step: steps[step] for step in steps if step < min(lasting)} | lasting
    assert train(tmp_path / "whole", *SMALL, data, env=recording(tmp_path / "samples")) == [0]
    assert steps == _samples(tmp_path / "samples")
    assert sorted(steps) == list(range(STEPS))
    assert set(sum((steps[step] for step in range(6)), Counter()).values()) == {1}
    all_used = sum(steps.values(), Counter())  # 72 samples: an epoch of 41, and 31 of the next
    assert Counter(all_used.values()) == {1: 41 - 31, 2: 31}
