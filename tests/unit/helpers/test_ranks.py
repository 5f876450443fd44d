"""The ranks of the tests: their environment, and the report of a rank that fails."""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch

from tests.helpers.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.processes


def look_around(rank: int, world: int) -> tuple[int, bool, bool]:
    return len(os.listdir("/proc/self/task")), "deepspeed" in sys.modules, "DS_ACCELERATOR" in os.environ


def test_what_is_preloaded_starts_no_thread_and_leaves_no_trace() -> None:
    ((threads, has_deepspeed, chooses_device),) = run_ranks(1, look_around)
    assert threads == 1  # a fork has only the thread that forks: what others held would stay locked
    assert has_deepspeed or torch.backends.cuda.is_built()
    assert not chooses_device


def fail_or_wait(rank: int, world: int) -> None:
    if rank == 0:
        raise ValueError("the first")
    time.sleep(60)


def test_a_rank_that_fails_is_quoted_and_the_others_are_ended() -> None:
    began = time.monotonic()
    with pytest.raises(RankFailure, match=r"--- rank 0:\n(.|\n)*ValueError: the first"):
        run_ranks(2, fail_or_wait, grace=0.2)
    assert time.monotonic() - began < 30
