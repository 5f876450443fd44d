"""Starts ranks on this host, each a process whose standard input begins with its job, one line of text. No torch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from dtrain.errors import DtrainError, RankError
from dtrain.redaction.redact import redact_file, redact_text

_POLL_S = 0.02
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
    """Starts ``python -m module`` with a pipe as standard input; :func:`kill_group` ends it with all it has started."""
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


def run_ranks(module: str, jobs: Sequence[str], *, threads: int, folder: Path) -> list[str]:
    """Runs ``python -m module`` once for each job, all at the same time, and waits for them.

    A rank reads its job with :func:`read_job`. What it writes to :func:`open_result` is its result, or the reason of
    its failure; standard error goes to ``folder/<rank>.log``, from which secrets are removed at the end.

    Returns:
        The results, by rank.

    Raises:
        RankError: a rank failed; the others were ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as logs, ExitStack() as stack:
        processes: list[subprocess.Popen[str]] = []
        stack.callback(_end_all, processes)
        outputs: list[IO[str]] = []
        for rank, job in enumerate(jobs):
            path = folder / f"{rank}.log"
            log = stack.enter_context(path.open("w", encoding="utf-8"))
            logs.callback(redact_file, path)
            outputs.append(stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")))
            processes.append(start_rank(module, threads=threads, stdout=outputs[rank], stderr=log))
            with suppress(BrokenPipeError):  # the exit code says why it has ended
                send_line(processes[rank], job)
        codes = [process.poll() for process in processes]
        while None in codes and not any(codes):
            time.sleep(_POLL_S)
            codes = [process.poll() for process in processes]
        for output in outputs:
            output.seek(0)
        results = [output.read() for output in outputs]
        failed = [(code, rank) for rank, code in enumerate(codes) if code]
        if failed:
            # A rank that a signal ended has a negative code. It comes first: its end may have made the others fail.
            code, rank = min(failed)
            stderr = (folder / f"{rank}.log").read_text(encoding="utf-8", errors="replace")
            reason = (results[rank].strip() or stderr.strip() or "no output").splitlines()[-1]
            raise RankError(f"rank {rank} {describe_exit(code)}: {redact_text(reason)}")
        return results


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


def _end_all(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            kill_group(process)
            process.wait()
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()


def describe_exit(code: int) -> str:
    """Returns how a process with this code of :class:`subprocess.Popen` has ended, as a predicate."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
