"""Jobs of an acceptance: each is a process that measures one thing and writes its results to a file as it goes.

A module of ``dtrain.measure.accept.parts`` that a job names has up to three functions::

    run(request: Request) -> Iterator[dict[str, Any]]        results so far, JSON-able; the last ones are complete
    conclusions(results: Mapping[str, Any]) -> list[str]     one line each, for the console and the top of the page
    section(results: Mapping[str, Any]) -> list[str]         Markdown lines of the page

All run in the job's process, because they import torch, and the command must stay ready to end what hangs. The file has
the results with these lines under ``conclusions`` and ``section``, so a job that is killed loses only what it had not
yielded. Two more keys mean the same in every job: ``failures``, lines on what does not hold on this machine, and
``left_out``, names of cases that did not run, with the reason.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dtrain.redaction.redact import redact_file, redact_text
from dtrain.tools.processes import describe_exit, kill_group, send_line, start_rank

WORKER = "dtrain.measure.accept.worker"
DONE, FAILED, LATE, CUT = "done", "failed", "late", "cut short"
"""Statuses of a job: it ended by itself, with an error, at its own limit, or because the command had no time left."""

_TAIL_LINES = 15


@dataclass(frozen=True)
class Request:
    """The order that a job's process gets.

    Attributes:
        device: ``cuda`` or ``cpu``.
        small: a CPU or a small GPU: shapes at which every case takes a second.
        output: file of the results.
        directory: for scratch files; other jobs use it too.
        seconds: time that the job may plan with.
        options: of the module.
    """

    device: str
    small: bool
    output: str
    directory: str
    seconds: float
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PartJob:
    """A job of a part, to be done.

    Attributes:
        part: key of :data:`dtrain.measure.accept.plan.PARTS`, under whose title the page shows it.
        module: in ``dtrain.measure.accept.parts``, or a full name.
        seconds: time to plan with.
        limit_s: time after which it is killed.
        again: returns the job that does what is left after this one failed, or None; see :class:`Ended`.
    """

    name: str
    part: str
    module: str
    seconds: float
    limit_s: float
    options: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 1
    again: Callable[[PartJob, Ended], PartJob | None] | None = None

    @property
    def file_name(self) -> str:
        return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in self.name)


@dataclass(frozen=True)
class Ended:
    """The end of a job, as a file of the results directory holds it.

    Attributes:
        status: :data:`DONE`; with any other, ``results`` are those that it had written.
        fingerprint: machine and versions; results with another one are not reused.
        tail: last lines of its log unless it is done.
    """

    name: str
    part: str
    status: str
    seconds: float
    results: dict[str, Any]
    error: str = ""
    tail: list[str] = field(default_factory=list)
    fingerprint: dict[str, Any] = field(default_factory=dict)

    @property
    def failures(self) -> list[str]:
        """Returns what does not hold, one line each."""
        found = [str(line) for line in self.results.get("failures") or []]
        return [f"{self.name} {self.status}: {self.error}", *found] if self.status in (FAILED, LATE) else found


class Running:
    """The process of a job. It imports its module at once, and begins its work with :meth:`send`."""

    def __init__(self, job: PartJob, folder: Path, device: str, *, small: bool) -> None:
        self.job = job
        self.log = folder / "logs" / f"{job.file_name}.log"
        self.output = folder / "jobs" / f"{job.file_name}.partial.json"
        self._request = Request(
            device, small, str(self.output.absolute()), str((folder / "scratch").absolute()), job.seconds, job.options
        )
        for path in (self.log, self.output):
            path.parent.mkdir(parents=True, exist_ok=True)
        Path(self._request.directory).mkdir(exist_ok=True)
        self.output.unlink(missing_ok=True)
        module = job.module if "." in job.module else f"dtrain.measure.accept.parts.{job.module}"
        with self.log.open("w", encoding="utf-8") as log:
            self._process = start_rank(WORKER, module, threads=job.threads, stdout=log, stderr=log)
        self._begin = self._end = float("inf")
        self._is_cut = False

    @property
    def has_begun(self) -> bool:
        return self._begin < float("inf")

    def send(self, left_s: float) -> None:
        """Starts the work, which gets at most ``left_s`` seconds."""
        self._begin = time.monotonic()
        self._end = self._begin + min(self.job.limit_s, left_s)
        self._is_cut = left_s < self.job.limit_s
        request = asdict(self._request) | {"seconds": min(self.job.seconds, left_s)}
        with suppress(BrokenPipeError):  # the exit code says why it has ended
            send_line(self._process, json.dumps(request))

    def results(self) -> dict[str, Any]:
        """Returns what the job has written so far."""
        return read_json(self.output)

    def poll(self) -> Ended | None:
        """Returns how the job ended, or None; kills it when its time is over."""
        code = self._process.poll()
        is_late = code is None and time.monotonic() > self._end
        if code is None and not is_late:
            return None
        return self._ended(code, is_late=is_late)

    def kill(self) -> None:
        """Ends the process, and what it has started and left behind."""
        kill_group(self._process)
        self._process.wait()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        redact_file(self.log)

    def _ended(self, code: int | None, *, is_late: bool) -> Ended:
        seconds = time.monotonic() - self._begin if self.has_begun else 0.0
        self.kill()
        results = self.results()
        if code == 0 and results:
            return Ended(self.job.name, self.job.part, DONE, seconds, results)
        tail = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        status = FAILED
        if is_late:
            status = CUT if self._is_cut else LATE
            why = "no time was left" if self._is_cut else "this is its limit"
            error = f"not finished after {seconds:.0f} s, so it was killed: {why}"
        else:
            reason = results.pop("error", "") or next((line for line in reversed(tail) if line.strip()), "no output")
            error = f"{describe_exit(code or 0)}: {redact_text(str(reason).strip())}"
        return Ended(self.job.name, self.job.part, status, seconds, results, error, tail)


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; empty if the file is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
