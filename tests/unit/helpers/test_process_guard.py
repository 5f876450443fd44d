"""A test without a marker cannot start a process; this file has none."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.helpers.ranks import run_ranks

STARTS: dict[str, Callable[[], object]] = {
    "subprocess": lambda: subprocess.run([sys.executable, "--version"], check=False),
    "shell": lambda: os.system("true"),
    "fork": os.fork,
    "multiprocessing": multiprocessing.get_context("spawn").Process(target=print).start,
    "run_ranks": lambda: run_ranks(1, print),
}


@pytest.mark.parametrize("start", STARTS)
def test_unmarked_test_cannot_start_a_process(start: str) -> None:
    with pytest.raises(pytest.fail.Exception, match="without a marker"):
        STARTS[start]()
