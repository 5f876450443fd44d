"""Asynchronous saves: one at a time, failures on all ranks, threads that hang or do not start, processes that end."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import dtrain
from dtrain.checkpoint import list_checkpoints, open_newest
from dtrain.errors import CheckpointError, CommunicationError
from tests.engines.checks.checkpoints import held_up, on_call
from tests.engines.helpers import start, state_digests, train_step
from tests.helpers.checkpoints import ALONE
from tests.helpers.host_reads import like_a_gpu
from tests.helpers.launch import Job
from tests.helpers.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.processes

MICRO_BATCHES = 4


def fail() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def raised(call: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointError) as error:
        call()
    return str(error.value)


def _saves_while_one_is_under_way(rank: int, world: int, directory: Path) -> None:
    engine = start("native", 2)
    assert engine.wait_for_save() is None
    train_step(engine, MICRO_BATCHES)
    with held_up() if rank == world - 1 else nullcontext():  # busy on one rank only
        first = engine.save(directory, asynchronous=True)
        train_step(engine, MICRO_BATCHES)
        assert engine.save(directory, asynchronous=True, when_busy="skip") is None
        assert engine.save(directory, when_busy="skip") is None
    assert engine.save(directory).exists()  # waits for the first, and is not asynchronous itself
    assert engine.wait_for_save() == first == directory / "step-00000001"
    train_step(engine, MICRO_BATCHES)
    third = engine.save(directory, asynchronous=True, when_busy="skip")  # nothing is under way
    assert engine.load(directory) == {}
    assert third == directory / "step-00000003", "a load waits for the save before it"
    assert engine.attempted_steps == 3
    with pytest.raises(dtrain.errors.UsageError, match="expected 'wait' or 'skip'"):
        engine.save(directory, when_busy="later")


def test_only_one_save_runs_at_a_time(tmp_path: Path) -> None:
    run_ranks(2, _saves_while_one_is_under_way, tmp_path)
    assert [item.path.name for item in list_checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]


def _failures(rank: int, world: int, directory: Path) -> list[str]:
    engine = start("native", 2)
    train_step(engine, MICRO_BATCHES)
    engine.save(directory, asynchronous=True, metrics={"val_loss": 2.0, "train_loss": float("nan"), "other": None})
    engine.wait_for_save()
    messages = []
    for collect in (engine.wait_for_save, lambda: engine.save(directory), lambda: engine.load(directory)):
        train_step(engine, MICRO_BATCHES)
        with on_call("rename", fail) if rank == 0 else nullcontext():
            engine.save(directory, asynchronous=True)
            engine._between.parts.checkpointer._saver._thread.join()
        messages.append(raised(collect))
        assert train_step(engine, MICRO_BATCHES).applied, "it was raised already"
    wrong = ({"extra": {"when": object()}}, {"metrics": {"val_loss": "0.5"}}, {"config": {1: 2, "a": 3}})
    for options in wrong:
        messages.append(raised(partial(engine.save, directory, asynchronous=True, **(options if rank == 0 else {}))))
    extra = {"list": [1]}
    path = engine.save(directory, asynchronous=True, extra=extra)
    extra["list"].append(2)
    assert engine.wait_for_save() == path
    assert engine.load(directory) == {"list": [1]}
    return messages


def test_failed_save_is_raised_once_on_every_rank(tmp_path: Path) -> None:
    results = run_ranks(2, _failures, tmp_path)
    assert results[0] == results[1]
    for step, message in zip((2, 4, 6), results[0], strict=False):
        assert f"saving {tmp_path}/step-{step:08d} failed on rank 0: Input/output error (errno 5)" in message
    for message, value in zip(results[0][3:], ("<object", "'0.5'", "the key 1"), strict=True):
        assert re.search(f"step 7 .*failed on rank 0: .*{value}", message)
    assert [item.path.name for item in list_checkpoints(tmp_path)] == ["step-00000001", "step-00000007"]
    assert open_newest(tmp_path / "step-00000001", ALONE).state["metrics"] == {"val_loss": 2.0}


def _fails_behind_a_device(rank: int, world: int, directory: Path) -> dict[str, str]:
    engine = start("native", 2, dropout=0.1)
    reads = like_a_gpu(engine)
    train_step(engine, MICRO_BATCHES)
    for collect_early in (False, True):
        with on_call("write", fail) if rank == world - 1 else nullcontext():
            engine.save(directory, asynchronous=True)
            if rank == world - 1:
                until(lambda: engine._between.parts.checkpointer._saver.has_failed)
            outcome = train_step(engine, MICRO_BATCHES)  # its vote says so
            assert reads[-1] != engine.attempted_steps - 1, "the step is not read yet"
            if rank == 0:
                assert outcome.applied  # the ranks read at different times
            if collect_early:
                assert "failed on rank 1" in raised(engine.wait_for_save)
        if not collect_early:
            assert "failed on rank 1" in raised(lambda: train_step(engine, MICRO_BATCHES))
            assert engine.step().applied, "the step that has raised it is called again"
    assert train_step(engine, MICRO_BATCHES).applied, "it was raised already"
    return state_digests(engine)


def test_failed_save_is_raised_one_step_later_with_lazy_outcomes(tmp_path: Path) -> None:
    results = run_ranks(2, _fails_behind_a_device, tmp_path)
    assert results[0] == results[1]
    assert list_checkpoints(tmp_path) == []


def _dies_while_saving(rank: int, world: int, directory: Path) -> None:
    engine = start("native", 2)
    train_step(engine, MICRO_BATCHES)
    with on_call("write", partial(time.sleep, 0.3)):
        engine.save(directory, asynchronous=True)
        if rank == world - 1:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(CommunicationError):  # noqa: PT012 - a step or a later one
            for _ in range(50):
                train_step(engine, MICRO_BATCHES)
        began = time.monotonic()
        engine.leave_save(cancel=True)
        assert time.monotonic() - began < 2, "it writes on in vain"
    assert not any(thread.name == "dtrain-save" for thread in threading.enumerate())


def test_a_rank_that_dies_ends_the_save_of_the_others(tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, _dies_while_saving, tmp_path)
    assert "rank 1:\nthe process died without a result" in str(failure.value)
    assert "rank 0" not in str(failure.value)
    assert [path.name[:18] for path in tmp_path.glob("step-*")] == ["step-00000001.tmp-"]


TIMEOUT_S = 2.0


def _hangs(rank: int, world: int, folder: Path, connects: bool) -> float:
    """Rank 1 does not write, or (``connects`` is false) does not connect the thread that would."""
    store, left = dist.FileStore(str(folder / "store"), world), folder / "left"
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_S))
    engine = start("native", 2)
    try:
        with held_up("write") if rank == 1 else nullcontext():
            if connects:
                train_step(engine, MICRO_BATCHES)
                engine.save(folder / "checkpoints", asynchronous=True)
            if rank == 1:
                until(left.exists)
                return 0.0
        began = time.monotonic()
        message = "" if connects else r"gather_rows\(barrier, 1 x uint8\) in prepare_saves failed"
        with pytest.raises(CommunicationError, match=message):
            train_step(engine, MICRO_BATCHES) if connects else engine.prepare_saves()
        engine.leave_save(cancel=True)
        return time.monotonic() - began
    finally:
        left.touch()


@pytest.mark.parametrize("connects", [True, False])
def test_a_rank_that_hangs_ends_the_save_of_the_others(tmp_path: Path, connects: bool) -> None:
    waited, _ = run_ranks(2, _hangs, tmp_path, connects, timeout=60)
    assert TIMEOUT_S - 1 < waited < TIMEOUT_S + 10


def _cannot_start_a_thread(rank: int, world: int, directory: Path) -> str:
    engine = start("native", 2)
    train_step(engine, MICRO_BATCHES)

    refused = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread"))
    with refused if rank == 1 else nullcontext():
        failure = raised(lambda: engine.save(directory, asynchronous=True))
    until(lambda: not any(thread.name == "dtrain-save" for thread in threading.enumerate()))
    engine.leave_save()
    assert engine.save(directory, asynchronous=True) == engine.wait_for_save() == directory / "step-00000001"
    return failure


def test_a_thread_that_does_not_start_is_named_by_all(tmp_path: Path) -> None:
    failures = run_ranks(2, _cannot_start_a_thread, tmp_path)
    assert failures[0] == failures[1]
    assert "failed on rank 1: RuntimeError: can't start new thread" in failures[0]


def _two_engines_save_at_once(rank: int, world: int, folder: Path) -> None:
    """Each leaves no process group behind."""
    held: list[int] = []
    for number in range(3):
        engines = [start("native", 2) for _ in range(2)]
        with held_up() if rank == 0 else nullcontext():
            for name, engine in enumerate(engines):
                train_step(engine, MICRO_BATCHES)
                engine.save(folder / f"{number}-{name}", asynchronous=True)
        for name in (1, 0):
            assert engines[name].wait_for_save() == folder / f"{number}-{name}" / "step-00000001"
        del engine, engines
        gc.collect()
        held.append(sum(len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")))
    assert held[2] < held[0] + 5, held  # a process group has eight


def test_saves_of_two_engines_do_not_mix(tmp_path: Path) -> None:
    run_ranks(2, _two_engines_save_at_once, tmp_path)


@pytest.mark.parametrize(
    "how", ["end", *(pytest.param(how, marks=pytest.mark.exhaustive) for how in ("raise", "fail"))]
)
def test_a_script_that_ends_early_waits_for_its_save(tmp_path: Path, how: str) -> None:
    """At the end of the interpreter, where a thread that still communicates would abort the process."""
    command = [sys.executable, "-m", "tests.helpers.leaves_early"]
    with ExitStack() as running:
        started = (Job([*command, str(rank), str(tmp_path), how], tmp_path) for rank in range(2))
        jobs = [running.enter_context(job) for job in started]
        assert [job.wait() for job in jobs] == [int(how == "raise")] * 2, [job.output for job in jobs]
        if how == "raise":
            assert "ValueError: a bug of the script" in jobs[1].output
            assert "CommunicationError" in jobs[0].output
        if how == "fail":  # nobody asks, so the thread says it
            said = "checkpoint: saving .*step-00000001 failed on rank 0.*No space left on device"
            assert all(re.search(said, job.output) for job in jobs)
    found = [item.path.name for item in list_checkpoints(tmp_path / "checkpoints")]
    assert found == ([] if how == "fail" else ["step-00000001"])
