"""Ranks that dtrain starts on this host by itself, each a process with one order: a line of text. Imports no torch."""

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

from dtrain.errors import RankError

_POLL_S = 0.02


def environment(threads: int) -> dict[str, str]:
    """The environment of a rank: dtrain importable, the threads set, gloo on the loopback interface."""
    package_parent = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (package_parent, os.environ.get("PYTHONPATH"))))
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    extra = {"GLOO_SOCKET_IFNAME": loopback} if loopback else {}
    return {**os.environ, **extra, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}


def run_ranks(module: str, orders: Sequence[str], *, threads: int, folder: Path) -> list[str]:
    """Runs ``python -m module`` once for each order, all at the same time, and waits for them.

    A rank reads its order with :func:`read_order`. What it writes to :func:`open_answer` is its answer, or the reason
    why it failed; standard error goes to ``folder/<rank>.log``.

    Returns:
        The answers, by rank.

    Raises:
        RankError: a rank failed; the others were ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        processes: list[subprocess.Popen[str]] = []
        stack.callback(_end_all, processes)
        answers: list[IO[str]] = []
        for rank, order in enumerate(orders):
            log = stack.enter_context((folder / f"{rank}.log").open("w", encoding="utf-8"))
            answers.append(stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")))
            process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=answers[rank],
                stderr=log,
                env=environment(threads),
                text=True,
                start_new_session=True,  # a process group of its own, so that its compilers end with it
            )
            processes.append(process)
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it is gone already, and its exit code says why
                process.stdin.write(order + "\n")
                process.stdin.flush()
        codes = [process.poll() for process in processes]
        while None in codes and not any(codes):
            time.sleep(_POLL_S)
            codes = [process.poll() for process in processes]
        for answer in answers:
            answer.seek(0)
        texts = [answer.read() for answer in answers]
        failed = [(code, rank) for rank, code in enumerate(codes) if code]
        if failed:
            code, rank = min(failed)  # one ended by a signal, whose code is negative, is no victim of the others
            said = (folder / f"{rank}.log").read_text(encoding="utf-8", errors="replace")
            words = (texts[rank].strip() or said.strip() or "without a word").splitlines()[-1]
            raise RankError(f"rank {rank} {_ending(code)}: {words}")
        return texts


def read_order() -> str:
    """This rank's order. From here on the rank ends as soon as the process that has started it is gone."""
    order = sys.stdin.readline()

    def end_with_the_starter() -> None:
        while os.read(0, 1):  # empty once the other end of the pipe is closed
            pass
        os._exit(1)

    threading.Thread(target=end_with_the_starter, daemon=True).start()
    return order


def open_answer() -> IO[str]:
    """Standard output for this rank's answer alone: what libraries print goes to standard error."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answer


def kill_group(process: subprocess.Popen[str]) -> None:
    """Ends ``process`` and what it has started."""
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


def _ending(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
