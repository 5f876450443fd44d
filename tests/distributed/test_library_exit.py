"""A user's own script, which calls ``dtrain.initialize`` and nothing to end it."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import dtrain
from dtrain.distributed import setup
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
