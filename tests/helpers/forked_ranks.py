"""Ranks of a command, forked from the warm server: a fresh interpreter would spend seconds on its imports."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from multiprocessing import reduction
from pathlib import Path
from typing import IO, Any

from dtrain.tools.ranks import environment
from tests.helpers.ranks import fork


class _Descriptor:
    """A file descriptor that is sent to a forked process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self.number),)


def _received(descriptor: Any) -> _Descriptor:
    return _Descriptor(descriptor.detach())


def _run(module: str, arguments: list[str], streams: list[_Descriptor], variables: dict[str, str], cwd: str) -> None:
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    for number, stream in enumerate(streams):
        os.dup2(stream.number, number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, "w" if n else "r", buffering=1, closefd=False) for n in range(3))
    sys.path[:0] = variables["PYTHONPATH"].split(os.pathsep)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class ForkedRank:
    """What the tools use of ``subprocess.Popen``."""

    def __init__(self, module: str, arguments: list[str], threads: int, stdout: IO[str] | int, stderr: IO[str]) -> None:
        their_input, our_input = os.pipe()
        our_output, their_output = os.pipe() if stdout == subprocess.PIPE else (-1, os.dup(_number(stdout)))
        streams = [_Descriptor(number) for number in (their_input, their_output, stderr.fileno())]
        self._process = fork(_run, module, arguments, streams, environment(threads), str(Path.cwd()))
        for number in (their_input, their_output):
            os.close(number)
        self.stdin = os.fdopen(our_input, "w")
        self.stdout = os.fdopen(our_output) if our_output >= 0 else None
        self.pid = self._process.pid
        self.kill = self._process.kill

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)
        return code


def _number(stream: IO[str] | int) -> int:
    return stream if isinstance(stream, int) else stream.fileno()


def start_rank(module: str, *arguments: str, threads: int, stdout: IO[str] | int, stderr: IO[str]) -> ForkedRank:
    """Takes the place of ``dtrain.tools.ranks.start_rank``."""
    return ForkedRank(module, list(arguments), threads, stdout, stderr)
