"""The processes of one benchmark case, which live through the whole run."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from dtrain.config.dump import config_to_dict, from_plain
from dtrain.config.tool_schema import SuiteConfig
from dtrain.errors import BenchError
from dtrain.measure.bench.records import BenchmarkCase, Footprint, RankJob, TimedSteps
from dtrain.redaction.redact import redact_text
from dtrain.tools.processes import kill_group, send_line, start_rank

_START_S = 300.0  # a peer may compile its extensions in its first start
_RESULT_S = 900.0  # a rank without a result for this long hangs
_EXIT_S = 10.0


class CaseProcesses:
    """The ranks of one case; use as a context manager, which ends them."""

    def __init__(self, case: BenchmarkCase, config: SuiteConfig) -> None:
        self.case = case
        self._stack = ExitStack()
        self._folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="dtrain-bench-"))
        self._processes: list[subprocess.Popen[str]] = []
        self._logs: list[IO[str]] = []
        self._config = config_to_dict(config)
        self._threads = config.bench.threads_per_rank

    def __enter__(self) -> CaseProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Ends the processes and waits for them; may be called more than once."""
        self.request_end()
        for process in self._processes:
            try:
                process.wait(_EXIT_S)
            except subprocess.TimeoutExpired:
                kill_group(process)
                process.wait()
            _not_none(process.stdout).close()
        self._stack.close()

    def request_end(self) -> None:
        """Closes the pipe that the processes read, which ends them; does not wait."""
        for process in self._processes:
            with suppress(BrokenPipeError):  # it has ended already
                _not_none(process.stdin).close()

    def start(self) -> float:
        """Starts the processes; returns the seconds until the end of the first step.

        Raises:
            BenchError: a process failed.
        """
        begin = time.perf_counter()
        for _ in range(self.case.ranks):
            log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed by the stack
            self._stack.enter_context(log)
            self._logs.append(log)
            module = "dtrain.measure.bench.training.worker"
            self._processes.append(start_rank(module, threads=self._threads, stdout=subprocess.PIPE, stderr=log))
        store = str(Path(self._folder, "store"))
        for rank in range(self.case.ranks):
            self._send(rank, asdict(RankJob(self.case, rank, store, self._config)))
        self._request({"steps": 1}, _START_S)
        return time.perf_counter() - begin

    def take_steps(self, count: int) -> TimedSteps:
        load = os.getloadavg()[0]
        if not count:
            return TimedSteps([], [], load)
        ranks = self._request({"steps": count})
        step_ms = [max(times) for times in zip(*(rank["step_ms"] for rank in ranks), strict=True)]
        losses = [sum(row) / len(row) for row in zip(*(rank["losses"] for rank in ranks), strict=True)]
        cpu_ms = [sum(times) for times in zip(*(rank["cpu_ms"] for rank in ranks), strict=True)]
        parts_ms = {name: [rank["parts_ms"][name] for rank in ranks] for name in ranks[0]["parts_ms"]}
        return TimedSteps(step_ms, losses, load, cpu_ms, parts_ms)

    def footprint(self) -> Footprint:
        ranks = [from_plain(Footprint, rank) for rank in self._request({"footprint": True})]
        most = max(ranks, key=lambda rank: sum(rank.state.values()))
        devices = [rank.peak_device for rank in ranks if rank.peak_device is not None]
        return replace(most, peak_rss=max(rank.peak_rss for rank in ranks), peak_device=max(devices, default=None))

    def _request(self, request: dict[str, Any], limit_s: float = _RESULT_S) -> list[dict[str, Any]]:
        for rank in range(len(self._processes)):
            self._send(rank, request)
        waiting = {_not_none(process.stdout): rank for rank, process in enumerate(self._processes)}
        results: dict[int, dict[str, Any]] = {}
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], limit_s)
            if not ready:
                raise BenchError(f"{self.case.name}: no result after {limit_s:.0f} s; a rank hangs")
            for pipe in ready:
                rank = waiting.pop(pipe)
                line = pipe.readline()  # a result is one line, so nothing stays in the buffer
                if not line:
                    raise self._unexpected_end(rank)
                results[rank] = json.loads(line)
                if "failure" in results[rank]:
                    raise BenchError(f"{self.case.name}: rank {rank} failed: {results[rank]['failure']}")
        return [results[rank] for rank in range(len(self._processes))]

    def _send(self, rank: int, values: dict[str, Any]) -> None:
        try:
            send_line(self._processes[rank], json.dumps(values))
        except BrokenPipeError:
            raise self._unexpected_end(rank) from None

    def _unexpected_end(self, rank: int) -> BenchError:
        """Returns the error for a rank that ended without a reason, for example because it was killed."""
        with suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(_EXIT_S)
        self._logs[rank].seek(0)
        stderr = self._logs[rank].read().strip().splitlines()
        code = self._processes[rank].poll()
        reason = redact_text(stderr[-1]) if stderr else "no output"
        return BenchError(f"{self.case.name}: rank {rank} ended with exit code {code}: {reason}")


def _not_none(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None  # standard input and output are pipes
    return pipe
