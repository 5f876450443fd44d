"""Ranks of a command, forked from the warm server: a fresh interpreter would spend seconds on its imports."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing import reduction
from operator import methodcaller
from pathlib import Path
from typing import IO, Any

import pytest

from dtrain.tools.processes import environment
from tests.helpers.ranks import fork

_STARTERS = (
    "dtrain.measure.ranks",
    "dtrain.tools.data.pool",
    "dtrain.measure.accept.job",
)


class _Descriptor:
    """A file descriptor that a forked process gets as the number of its own."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return methodcaller("detach"), (reduction.DupFd(self.number),)


def _run(module: str, arguments: list[str], streams: list[int], variables: dict[str, str], cwd: str) -> None:
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, "w" if n else "r", buffering=1, closefd=False) for n in range(3))
    sys.path[:0] = variables["PYTHONPATH"].split(os.pathsep)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class ForkedRank:
    """Takes the place of ``dtrain.tools.processes.start_rank``, with what the tools use of ``subprocess.Popen``."""

    def __init__(self, module: str, *arguments: str, threads: int, stdout: IO[str] | int, stderr: IO[str]) -> None:
        their_input, our_input = os.pipe()
        number = stdout if isinstance(stdout, int) else stdout.fileno()
        our_output, their_output = os.pipe() if number == subprocess.PIPE else (-1, os.dup(number))
        streams = [_Descriptor(stream) for stream in (their_input, their_output, stderr.fileno())]
        self._process = fork(_run, module, list(arguments), streams, environment(threads), str(Path.cwd()))
        os.close(their_input)
        os.close(their_output)
        self.stdin = os.fdopen(our_input, "w")
        self.stdout = os.fdopen(our_output) if our_output >= 0 else None
        self.pid = self._process.pid
        self.kill = self._process.kill
        with suppress(ProcessLookupError):  # it has ended
            while os.getpgid(self.pid) != self.pid:  # until it leads its group, who kills that would not reach it
                time.sleep(0.001)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)
        return code


@pytest.fixture
def warm_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets commands fork their ranks from the warm server; ``test_ranks.py`` tests the processes that they start."""
    for module in _STARTERS:
        monkeypatch.setattr(f"{module}.start_rank", ForkedRank)
