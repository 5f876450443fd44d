"""One rank of a measurement: ``python -m dtrain.measure.worker module:function``. torch is imported when it is needed.

The first line of its input is a ``Rank`` as JSON. ``function(rank)`` returns the result, or is a generator: the
first value that it yields is the first result, and each further line of input is a request, which it receives, and
whose result it yields next. A result is a line of JSON on standard output, ``{"result": ...}`` or
``{"failure": reason}``.
What libraries print goes to standard error. While a rank waits for a request it takes no time from others. When the
input ends, a waiting rank ends; one at work is killed with all it has started, because who started it has ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, is_dataclass
from importlib import import_module
from inspect import isgenerator
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any

from dtrain.distributed.logging import configure_logging
from dtrain.tools.processes import failure_reason, open_result

if TYPE_CHECKING:
    import torch


_GRACE_S = 1.0  # after the end of the input, for a rank that is about to wait


@dataclass(frozen=True)
class Rank:
    """Holds the job of a rank, and its place among the others.

    Attributes:
        job: plain values, the same on all ranks.
        rank, ranks: its number, and how many there are.
        store: file at which several ranks meet.
        device: ``auto``, ``cpu`` or ``cuda``; None: the job needs none, and no torch.
        threads: of torch; None: as the environment says.
        timeout_s: of collectives.
    """

    job: Any = field(default_factory=dict)
    rank: int = 0
    ranks: int = 1
    store: str = ""
    device: str | None = "auto"
    threads: int | None = 1
    timeout_s: float = 600.0

    def torch_device(self) -> torch.device:
        """Returns the device of this rank."""
        from dtrain.distributed.startup.setup import choose_device

        return choose_device(self.device or "cpu", self.rank)


@contextmanager
def connected(rank: Rank) -> Iterator[None]:
    """Inside, the process group of the ranks exists, and the process has their number of threads."""
    if rank.device is None:
        yield
        return
    import torch

    from dtrain.distributed.startup.launch_env import LaunchEnv
    from dtrain.distributed.startup.setup import connect_by_file, disconnect

    device, threads = rank.torch_device(), torch.get_num_threads()
    if rank.threads is not None:
        torch.set_num_threads(rank.threads)
    if rank.ranks > 1:
        LaunchEnv(rank.rank, rank.ranks, rank.rank, rank.ranks).export()  # libraries read these variables
    connect_by_file(rank.store, rank.rank, rank.ranks, device, rank.timeout_s)
    failed = True
    try:
        yield
        failed = False
    finally:
        torch.set_num_threads(threads)
        disconnect(failed=failed)


class _RequestQueue:
    """Lines of standard input, read by a thread, so that the end of the input is seen while the rank is at work."""

    def __init__(self) -> None:
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._is_waiting = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while line := sys.stdin.readline():
            self._lines.put(line)
        if self._is_waiting.wait(_GRACE_S):
            self._lines.put("")
            return
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    def next(self) -> str:
        """Waits for the next line; returns an empty one at the end of the input."""
        self.finish()
        line = self._lines.get()
        if line:
            self._is_waiting.clear()
        return line

    def finish(self) -> None:
        """Says that the rank is not at work, so that it may end by itself when the input ends."""
        self._is_waiting.set()


def main(name: str) -> int:
    """Serves the job; returns the exit code."""
    results, requests = open_result(), _RequestQueue()
    module, _, function = name.partition(":")
    try:
        serve = getattr(import_module(module), function)  # before the line, so that a rank is ready when it comes
        line = requests.next()
        if not line:
            return 1
        rank = Rank(**json.loads(line))
        configure_logging(rank.rank)
        with connected(rank):
            _serve(serve(rank), requests, results)
    except Exception as error:  # any error of a library is the reason of the failure
        traceback.print_exc()
        _write(results, {"failure": failure_reason(error)})
        return 1
    return 0


def _serve(found: Any, requests: _RequestQueue, results: IO[str]) -> None:
    if not isgenerator(found):
        _write(results, {"result": found})
        requests.finish()
        return
    result = next(found)
    while True:
        _write(results, {"result": result})
        line = requests.next()
        if not line:
            found.close()
            return
        result = found.send(json.loads(line))


def _write(results: IO[str], values: dict[str, Any]) -> None:
    results.write(json.dumps(values, default=_plain) + "\n")
    results.flush()


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"a result of a rank must be plain, not a {type(value).__name__}")


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the result is written; a library that hangs or fails at exit must not spoil it
