"""Starts the ranks of a measurement on this host, each a process of ``dtrain.measure.worker``. No torch."""

from __future__ import annotations

import json
import select
import subprocess
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from dtrain.errors import RankError
from dtrain.measure.worker import Rank
from dtrain.redaction.redact import redact_file, redact_text
from dtrain.tools.processes import describe_exit, kill_group, send_line, start_rank

_EXIT_S = 10.0


def run_ranks(function: str, rank: Rank, *, folder: Path, limit_s: float | None = None) -> list[Any]:
    """Runs ``function`` of ``module:function`` once on each rank; returns the results by rank.

    Args:
        function: see ``dtrain.measure.worker``.
        rank: what the first rank is told; the others get their numbers.
        folder: for the ranks' standard error, ``<rank>.log``, from which secrets are removed at the end.
        limit_s: after which they are ended; None: never.

    Raises:
        RankError: a rank failed, or the time is over; all were ended.
    """
    with Ranks(function, rank, folder=folder) as ranks:
        return ranks.results(limit_s)


class Ranks:
    """Ranks that stay until the end of the context: each gives a first result, and one for each request."""

    def __init__(self, function: str, rank: Rank, *, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._stack = ExitStack()
        self._processes: list[subprocess.Popen[str]] = []
        self._logs = [folder / f"{number}.log" for number in range(rank.ranks)]
        if rank.ranks > 1 and not rank.store:
            rank = replace(rank, store=str(folder.absolute() / "store"))
            Path(rank.store).unlink(missing_ok=True)
            self._stack.callback(Path(rank.store).unlink, missing_ok=True)
        try:
            for path in self._logs:
                log = self._stack.enter_context(path.open("w", encoding="utf-8"))
                self._stack.callback(redact_file, path)
                worker = ("dtrain.measure.worker", function)
                threads = rank.threads or 1
                self._processes.append(start_rank(*worker, threads=threads, stdout=subprocess.PIPE, stderr=log))
            for number in range(rank.ranks):
                self._send(number, asdict(replace(rank, rank=number)))
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.kill()
        self.end()

    def request(self, values: Any, limit_s: float | None = None) -> list[Any]:
        """Sends ``values`` to all ranks; returns their results.

        Raises:
            RankError: a rank failed, or gave no result within ``limit_s``.
        """
        for number in range(len(self._processes)):
            self._send(number, values)
        return self.results(limit_s)

    def results(self, limit_s: float | None = None) -> list[Any]:
        """Waits for the next result of each rank; raises as ``request``."""
        end = float("inf") if limit_s is None else time.monotonic() + limit_s
        waiting = {_pipe(process.stdout): number for number, process in enumerate(self._processes)}
        results: dict[int, Any] = {}
        while waiting:
            left = None if limit_s is None else max(0.0, end - time.monotonic())
            ready, _, _ = select.select(list(waiting), [], [], left)
            if not ready:
                raise RankError(f"rank {min(waiting.values())} has no result after {limit_s:.0f} s: it hangs")
            for pipe in ready:
                number = waiting.pop(pipe)
                line = pipe.readline()  # a result is one line, so nothing stays in the buffer
                answer = json.loads(line) if line.endswith("\n") else {}
                if "result" not in answer:
                    raise self._failure(number, answer.get("failure", ""))
                results[number] = answer["result"]
        return [results[number] for number in range(len(self._processes))]

    def _send(self, number: int, values: Any) -> None:
        try:
            send_line(self._processes[number], json.dumps(values))
        except BrokenPipeError:
            raise self._failure(number, "") from None

    def _failure(self, number: int, reason: str) -> RankError:
        """Returns the error of the rank that ended first."""
        with suppress(subprocess.TimeoutExpired):
            self._processes[number].wait(_EXIT_S)
        codes = [process.poll() for process in self._processes]
        # a rank that a signal ended has a negative code; it comes first: its end may have made the others fail
        killed = [(code, other) for other, code in enumerate(codes) if code is not None and code < 0]
        if killed and not (reason and codes[number] == min(killed)[0]):
            number, reason = min(killed)[1], ""
        if not reason:
            stderr = self._logs[number].read_text(encoding="utf-8", errors="replace").strip()
            reason = redact_text((stderr or "no output").splitlines()[-1])
        return RankError(f"rank {number} {describe_exit(codes[number] or 0)}: {reason}")

    def kill(self) -> None:
        """Ends the ranks and what they have started, at once."""
        for process in self._processes:
            if process.poll() is None:
                kill_group(process)

    def request_end(self) -> None:
        """Closes the pipe that the ranks read, which ends them when they wait; does not wait."""
        for process in self._processes:
            with suppress(BrokenPipeError):  # it has ended already
                _pipe(process.stdin).close()

    def end(self) -> None:
        """Ends the ranks and waits for them; may be called more than once."""
        self.request_end()
        for process in self._processes:
            try:
                process.wait(_EXIT_S)
            except subprocess.TimeoutExpired:
                kill_group(process)
                process.wait()
            _pipe(process.stdout).close()
        self._stack.close()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None  # standard input and output are pipes
    return pipe
