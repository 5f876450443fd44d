"""Stop signals, sent to real processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection

import pytest

from dtrain.train.signals import STOP_SIGNALS, StopSignals
from tests.helpers.ranks import fork


def _child(pipe: Connection, linger_s: float) -> None:
    with StopSignals() as stop:
        pipe.send("ready")
        while not stop.requested:
            time.sleep(0.01)
        pipe.send(stop.name)
        time.sleep(linger_s)
    sys.exit(75)


FIRST_ONLY = [((number,), 0.0, 0.0, 75) for number in STOP_SIGNALS]
FORWARDED_COPY = ((signal.SIGINT, signal.SIGTERM), 0.0, 0.3, 75)  # it is the same request
SECOND = ((signal.SIGTERM, signal.SIGTERM), 1.1, 300.0, -signal.SIGTERM)  # it ends at once


@pytest.mark.processes
@pytest.mark.parametrize(("numbers", "pause_s", "linger_s", "code"), [*FIRST_ONLY, FORWARDED_COPY, SECOND])
def test_the_first_signal_requests_a_stop_and_a_second_one_ends(
    numbers: tuple[signal.Signals, ...], pause_s: float, linger_s: float, code: int
) -> None:
    pipe, theirs = multiprocessing.Pipe()
    child = fork(_child, theirs, linger_s)
    assert pipe.recv() == "ready"
    assert child.pid is not None
    os.kill(child.pid, numbers[0])
    assert pipe.recv() == numbers[0].name
    time.sleep(pause_s)
    for number in numbers[1:]:
        os.kill(child.pid, number)
    child.join(timeout=60)
    assert child.exitcode == code


def test_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.requested
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_no_handler_outside_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def enter() -> None:
        with StopSignals() as stop:
            seen.extend([stop.requested, signal.getsignal(signal.SIGTERM)])

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [False, before]
