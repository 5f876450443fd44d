"""A user's own script, which calls ``dtrain.initialize`` and nothing to end it."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import dtrain
from dtrain.distributed import setup
from tests.helpers.launch import Job
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes


def leave(rank: int, world: int, port: int, fails: bool) -> tuple[bool, bool, bool]:
    """Runs a rank's exit functions; returns whether its group was there before and after, and if it has waited."""
    dist.destroy_process_group()  # a user's script has none
    meeting = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in {**meeting, "LOCAL_WORLD_SIZE": world}.items()})
    functions: list[Callable[[], None]] = []
    with mock.patch.object(atexit, "register", lambda fn, *args: functions.append(partial(fn, *args))):
        engine = dtrain.initialize(torch.nn.Linear(8, 8), precision="fp32", seed=0)
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()
    before = dist.is_initialized()
    if fails:
        sys.last_value = ZeroDivisionError("on purpose")
    began = time.monotonic()
    for function in (*reversed(functions), setup._let_gloo_release):
        function()
    return before, dist.is_initialized(), time.monotonic() - began >= setup._RELEASE_S


@pytest.mark.parametrize("fails", [False, True])
def test_exit_functions_end_the_group_that_initialize_made(fails: bool) -> None:
    """After an exception it stays, for the other ranks may never answer, and gloo's threads get time to release."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert run_ranks(2, leave, port, fails, fresh=True) == [(True, fails, fails)] * 2


FAILS = """
import atexit, os, sys

atexit.register(sum, range(15_000_000))  # the last exit function: it keeps the interpreter's lock beyond those 100 ms
import torch
import torch.distributed as dist
from dtrain.distributed.setup import connect_by_file, disconnect

folder, rank, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
connect_by_file(f"{folder}/store", rank, 2, torch.device("cpu"))
group = dist.group.WORLD  # as an engine keeps it
dist.barrier()
if rank == 1:
    os.environ["SLOW_GLOO"] = "1"
dist.all_reduce(torch.ones(8))
if rank == 0:
    os._exit(0)
if how == "raise":
    raise ZeroDivisionError("on purpose")
disconnect(failed=True)
sys.exit(1)
"""


@pytest.mark.compile
@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["raise", "disconnect"])
def test_a_thread_of_gloo_that_is_late_does_not_abort_a_rank_that_failed(tmp_path: Path, how: str) -> None:
    """It takes the interpreter's lock to release a tensor; at the end of the interpreter that was exit code -6."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path / "slow_gloo.so"
    source = Path(__file__).parents[1] / "helpers/slow_gloo.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    (tmp_path / "script.py").write_text(FAILS, encoding="ascii")
    command = [sys.executable, "script.py", str(tmp_path)]
    with (
        Job([*command, "0", how], tmp_path),
        Job([*command, "1", how], tmp_path, {"LD_PRELOAD": str(library)}) as job,
    ):
        assert job.wait() == 1, job.output
        assert ("ZeroDivisionError: on purpose" in job.output) == (how == "raise"), job.output
