"""Runs one process with a time limit; its failure and its lateness are results."""

from __future__ import annotations

import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dtrain.redaction.redact import redact_file, redact_text
from dtrain.tools.ranks import describe_exit, kill_group, send_line, start_rank

_TAIL_LINES = 15


@dataclass(frozen=True)
class Ended:
    """Result of a process.

    Attributes:
        result: what it wrote to ``open_result``.
        error: one line; empty if it ended by itself with exit code 0.
        is_late: whether it was killed at its time limit.
        tail: the last lines of its log if it did not end well.
    """

    result: str
    seconds: float
    error: str = ""
    is_late: bool = False
    tail: list[str] = field(default_factory=list)


def run_process(module: str, job: str, *, limit_s: float, threads: int, log: Path) -> Ended:
    """Runs ``python -m module``, which reads the line ``job`` with ``read_job``, and kills its group after ``limit_s``.

    Standard error, and what libraries print, is appended to ``log``, from which secrets are removed at the end.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    with log.open("a", encoding="utf-8") as stderr, tempfile.TemporaryFile("w+", encoding="utf-8") as stdout:
        process = start_rank(module, threads=threads, stdout=stdout, stderr=stderr)
        is_late = False
        try:
            with suppress(BrokenPipeError):  # the exit code says why it has ended
                send_line(process, job)
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:  # also what it has started and left behind, and after Ctrl-C
            kill_group(process)
            process.wait()
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
        stdout.seek(0)
        result = stdout.read()
    redact_file(log)
    seconds, code = time.perf_counter() - begin, process.returncode
    if not (code or is_late):
        return Ended(result, seconds)
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    if is_late:
        return Ended(result, seconds, f"not finished after {seconds:.0f} s, so it was killed", True, tail)
    reason = next((line for line in reversed([*tail, *result.splitlines()]) if line.strip()), "no output")
    return Ended(result, seconds, f"{describe_exit(code)}: {redact_text(reason.strip())}", False, tail)
