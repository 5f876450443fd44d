"""The ranks of the tests: they stay between jobs unless a job has damaged them, and a failure is quoted."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dtrain.distributed.communicator import Communicator
from tests.helpers.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.processes


def look_around(rank: int, world: int) -> tuple[int, bool, bool]:
    return len(os.listdir("/proc/self/task")), "deepspeed" in sys.modules, "DS_ACCELERATOR" in os.environ


def test_what_is_preloaded_starts_no_thread_and_leaves_no_trace() -> None:
    ((threads, has_deepspeed, chooses_device),) = run_ranks(1, look_around, fresh=True)
    assert threads == 1  # a fork has only the thread that forks: what others held would stay locked
    assert has_deepspeed or torch.backends.cuda.is_built()
    assert not chooses_device


def who(rank: int, world: int) -> tuple[int, bool, str, str | None]:
    return os.getpid(), torch.are_deterministic_algorithms_enabled(), os.getcwd(), os.environ.get("PLANTED")


def change_what_is_put_back(rank: int, world: int) -> None:
    torch.use_deterministic_algorithms(True)
    os.environ["PLANTED"] = "yes"
    os.chdir("/")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def test_ranks_stay_between_jobs() -> None:
    run_ranks(4, who)  # so that there are more than the next jobs need
    first = run_ranks(2, who)
    run_ranks(2, change_what_is_put_back)
    assert run_ranks(2, who) == first
    assert not {pid for pid, *_ in run_ranks(2, who, fresh=True)} & {pid for pid, *_ in first}


def replace_a_method(rank: int, world: int) -> None:
    Communicator.barrier = lambda self: None  # type: ignore[method-assign]


def replace_a_function_of_os(rank: int, world: int) -> None:
    os.fsync = lambda descriptor: None


def leave_a_thread(rank: int, world: int) -> None:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


def leave_a_handler(rank: int, world: int) -> None:
    signal.signal(signal.SIGUSR1, lambda *_: None)


def die(rank: int, world: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(rank: int, world: int) -> None:
    raise ValueError("planted")


@pytest.mark.parametrize(
    "job", [replace_a_method, replace_a_function_of_os, leave_a_thread, leave_a_handler, die, fail]
)
def test_a_damaged_rank_is_replaced(job: Callable[..., Any]) -> None:
    run_ranks(4, who)
    before = {pid for pid, *_ in run_ranks(2, who)}
    try:
        run_ranks(2, job)
    except RankFailure:
        assert job in (die, fail)
    assert not {pid for pid, *_ in run_ranks(2, who)} & before


def fail_or_wait(rank: int, world: int) -> None:
    if rank == 0:
        raise ValueError("the first")
    time.sleep(60)


def test_a_rank_that_fails_is_quoted_and_the_others_are_ended() -> None:
    began = time.monotonic()
    with pytest.raises(RankFailure, match=r"--- rank 0:\n(.|\n)*ValueError: the first"):
        run_ranks(2, fail_or_wait, grace=0.2)
    assert time.monotonic() - began < 30
