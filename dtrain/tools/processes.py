"""Starts ranks on this host, each a process whose standard input begins with its job, one line of text. No torch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO

from dtrain.errors import DtrainError
from dtrain.redaction.redact import redact_text

_MAX_REASON_LENGTH = 500


def environment(threads: int) -> dict[str, str]:
    """Returns the environment of a rank: dtrain importable, the threads set, gloo on the loopback interface."""
    package_parent = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (package_parent, os.environ.get("PYTHONPATH"))))
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    extra = {"GLOO_SOCKET_IFNAME": loopback} if loopback else {}
    return {**os.environ, **extra, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}


def start_rank(
    module: str, *arguments: str, threads: int, stdout: IO[str] | int, stderr: IO[str]
) -> subprocess.Popen[str]:
    """Starts ``python -m module`` with a pipe as standard input; ``kill_group`` ends it with all it has started."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        env=environment(threads),
        text=True,
        start_new_session=True,  # a process group of its own, so that its compilers end with it
    )


def send_line(process: subprocess.Popen[str], line: str) -> None:
    """Writes one line to the standard input of ``process``; raises BrokenPipeError if it has ended."""
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def read_job() -> str:
    """Returns this rank's job. From here on the rank ends as soon as the process that started it has ended.

    What the rank has started in its process group ends with it.
    """
    job = sys.stdin.readline()

    def end_with_the_starter() -> None:
        while os.read(0, 1):  # empty once the other end of the pipe is closed
            pass
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=end_with_the_starter, daemon=True).start()
    return job


def open_result() -> IO[str]:
    """Reserves standard output for this rank's result: what libraries print goes to standard error."""
    result = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return result


def failure_reason(error: Exception) -> str:
    """Returns the message of ``error`` in one line, with the type of an error that is not dtrain's."""
    text = str(error) if isinstance(error, DtrainError) else f"{type(error).__name__}: {error}"
    return " ".join(redact_text(text).split())[:_MAX_REASON_LENGTH]


def kill_group(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def describe_exit(code: int) -> str:
    """Returns how a process with this code of ``subprocess.Popen`` has ended, as a predicate."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
