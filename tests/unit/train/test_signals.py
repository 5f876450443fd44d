"""Stop signals, sent to real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from dtrain.train.signals import STOP_SIGNALS, StopSignals

_CHILD = """
import sys, time
from dtrain.train.signals import StopSignals
with StopSignals() as stop:
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print(stop.name, flush=True)
    time.sleep(float(sys.argv[1]))
sys.exit(75)
"""


def _start(linger_s: float) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", _CHILD, str(linger_s)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


@pytest.mark.processes
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_first_signal_only_requests_a_stop(number: signal.Signals) -> None:
    child = _start(0.0)
    child.send_signal(number)
    out, _ = child.communicate(timeout=10)
    assert out == f"{number.name}\n"
    assert child.returncode == 75


@pytest.mark.processes
def test_forwarded_copy_of_a_signal_is_the_same_request() -> None:
    child = _start(0.3)
    child.send_signal(signal.SIGINT)
    assert child.stdout is not None
    assert child.stdout.readline() == "SIGINT\n"
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=10)
    assert child.returncode == 75


@pytest.mark.processes
def test_second_signal_ends_at_once() -> None:
    child = _start(300.0)
    child.send_signal(signal.SIGTERM)
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(1.1)
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGTERM


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
