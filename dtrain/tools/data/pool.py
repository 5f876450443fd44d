"""Processes that tokenize work units."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from queue import Empty, Queue
from subprocess import PIPE, Popen
from typing import IO, Any

from dtrain import errors
from dtrain.data.shards.format import ShardEntry
from dtrain.errors import DataError, RankError
from dtrain.tools.data.inputs import Source
from dtrain.tools.data.worker import Finished, TokenizeJob
from dtrain.tools.processes import describe_exit, kill_group, send_line, start_rank

_MODULE = "dtrain.tools.data.worker"
_REFRESH_S = 0.2


@dataclass
class _Worker:
    process: Popen[str]
    log: IO[str]
    unit: int = -1
    tokens: int = 0
    characters: int = 0


OnProgress = Callable[[int, int], None]
"""Called with the tokens and characters of the units in work."""


def run_units(
    job: TokenizeJob, units: Mapping[int, Sequence[Source]], num_workers: int, progress: OnProgress
) -> Iterator[tuple[int, Finished]]:
    """Yields each unit's number and result as it is finished; the processes end with the iterator.

    Raises:
        DtrainError: the error of a worker.
        RankError: a worker was ended from outside, for instance because memory was short.
    """
    remaining = iter(units.items())
    messages: Queue[tuple[_Worker, dict[str, Any] | None]] = Queue()
    with ExitStack() as stack:
        busy = 0
        workers = [_start(job, messages, stack) for _ in range(min(num_workers, len(units)))]
        for worker in workers:
            busy += _give(worker, remaining)
        while busy:
            try:
                worker, message = messages.get(timeout=_REFRESH_S)
            except Empty:
                message = {}
            if message is None:
                raise _ended(worker)
            if "error" in message:
                raise getattr(errors, message["kind"], DataError)(message["error"])
            if "finished" in message:
                raw, number = message["finished"], worker.unit
                busy += _give(worker, remaining) - 1
                yield number, Finished(ShardEntry(**raw["entry"]), raw["num_empty"])
            elif message:
                worker.tokens, worker.characters = message["tokens"], message["characters"]
            progress(sum(one.tokens for one in workers), sum(one.characters for one in workers))


def _start(job: TokenizeJob, messages: Queue[tuple[_Worker, dict[str, Any] | None]], stack: ExitStack) -> _Worker:
    log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
    stack.callback(log.close)
    worker = _Worker(start_rank(_MODULE, threads=1, stdout=PIPE, stderr=log), log)

    def receive() -> None:
        assert worker.process.stdout is not None
        try:
            for line in worker.process.stdout:
                messages.put((worker, json.loads(line)))
        except ValueError:  # it was ended within a line
            pass
        messages.put((worker, None))

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    stack.callback(_end, worker.process, thread)
    with suppress(BrokenPipeError):  # its end is a message of its own
        send_line(worker.process, json.dumps(asdict(job)))
    return worker


def _end(process: Popen[str], thread: threading.Thread) -> None:
    kill_group(process)
    process.wait()
    thread.join()
    for stream in (process.stdin, process.stdout):
        with suppress(BrokenPipeError):
            if stream is not None:
                stream.close()


def _give(worker: _Worker, remaining: Iterator[tuple[int, Sequence[Source]]]) -> int:
    """Sends a worker its next unit; returns how many it now has."""
    worker.tokens = worker.characters = 0
    number, sources = next(remaining, (-1, ()))
    worker.unit = number
    if number < 0:
        return 0
    with suppress(BrokenPipeError):
        send_line(worker.process, json.dumps({"number": number, "sources": [asdict(source) for source in sources]}))
    return 1


def _ended(worker: _Worker) -> RankError:
    code = worker.process.wait()
    worker.log.seek(0)
    reason = (worker.log.read().strip().splitlines() or ["no output; memory may be short: try workers=1"])[-1]
    return RankError(f"a process that tokenizes {describe_exit(code)}: {reason}")
