"""A job of an acceptance: a command in a process of its own, whose results are a file as they come. No torch."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtrain.redaction.redact import redact_file, redact_text
from dtrain.tools.processes import describe_exit, kill_group, send_line, start_rank

DONE, FAILED, LATE, CUT, UNDER_WAY = "done", "failed", "late", "cut short", "under way"
"""Statuses of a job: it ended by itself, with an error, at its own limit, because the command had no time left; or not
yet."""

_TAIL_LINES = 15
_ERROR = "dtrain: "
"""Start of the last line of a command that ended with an error."""


@dataclass(frozen=True)
class PartJob:
    """A command of an acceptance: a row of the table, and the same made for a machine.

    Attributes:
        name: unique; the page and the files of the results use it.
        part: key of ``dtrain.measure.accept.table.PARTS``, under whose title the page shows it.
        command: variables, module and words of ``python -m``. ``{out}`` is the results file, ``{folder}`` where it
            lies; in a row of the table other text in braces depends on the machine.
        limit_s: time after which it is killed; in a row of the table infinite: as long as anything runs side by side.
        results: end of the path of its results, after the name.
        imported: by its process while it waits.
        threads: of the processor; of a machine.
        starts: times that it is started again if its process crashes; it then does what is left.
        goals: in which it runs.
        on_cpu: the command on a CPU; None: the same; empty: none.
        together: whether it runs side by side with others, because it is small.
    """

    name: str
    part: str
    command: str
    limit_s: float = math.inf
    results: str = ".json"
    imported: str = "torch"
    threads: int = 1
    starts: int = 1
    goals: tuple[str, ...] = ("facts",)
    on_cpu: str | None = None
    together: bool = False

    @property
    def file_name(self) -> str:
        return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in self.name)

    def words(self, out: Path) -> list[str]:
        """Returns the words of the command with results in ``out``."""
        words = shlex.split(self.command)
        return [word.replace("{out}", str(out)).replace("{folder}", str(out.parent)) for word in words]

    @property
    def shown(self) -> str:
        """The command for a shell, without the place of its results."""
        words = [word for word in shlex.split(self.command) if "{out}" not in word and "{folder}" not in word]
        module = next(number for number, word in enumerate(words) if "=" not in word)
        if words[module] != "dtrain":
            words[module:module] = ["python", "-m"]
        return shlex.join(words)


@dataclass(frozen=True)
class Ended:
    """The end of a job, as a file of the results directory holds it.

    Attributes:
        command: which repeats it alone.
        status: ``DONE``; with any other, its results are those that it had written.
        results: path of its results in the results directory.
        fingerprint: machine and versions; results with another one are not reused.
        tail: last lines of its log unless it is done.
    """

    name: str
    part: str
    command: str
    status: str
    seconds: float
    results: str
    error: str = ""
    tail: list[str] = field(default_factory=list)
    fingerprint: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Lines:
    """Lines of one job.

    Attributes:
        conclusions: what works, how fast, what to set.
        failures: what does not hold on this machine; the exit code is then 1.
        left_out: name of each case that did not run, with the reason.
        section: Markdown.
    """

    conclusions: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left_out: Mapping[str, str] = field(default_factory=dict)
    section: list[str] = field(default_factory=list)


class Running:
    """The process of a job. It imports at once, and begins its work with ``send``.

    Args:
        job: to be done.
        folder: of the results.
        continues: whether earlier results of the job stay.
    """

    def __init__(self, job: PartJob, folder: Path, *, continues: bool) -> None:
        self.job = job
        self.log = folder / "logs" / f"{job.file_name}.log"
        self.output = Path(f"{folder}/results/{job.file_name}{job.results}")
        if not continues:
            self.output.unlink(missing_ok=True)
            if job.results.startswith("/"):
                shutil.rmtree(self.output.parent, ignore_errors=True)
        for path in (self.log, self.output):
            path.parent.mkdir(parents=True, exist_ok=True)
        words = [job.imported, *job.words(self.output.absolute())]
        with self.log.open("a", encoding="utf-8") as log:
            self._log_start = log.tell()
            self._process = start_rank(
                "dtrain.measure.accept.start", *words, threads=job.threads, stdout=log, stderr=log
            )
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
        with suppress(BrokenPipeError):  # the exit code says why it has ended
            send_line(self._process, "begin")

    def poll(self) -> Ended | None:
        """Returns how the job ended, or None; kills it when its time is over."""
        code = self._process.poll()
        is_late = code is None and time.monotonic() > self._end
        if code is None and not is_late:
            return None
        seconds = time.monotonic() - self._begin if self.has_begun else 0.0
        self.kill()
        if is_late:
            why = "no time was left" if self._is_cut else "this is its limit"
            return self.ended(CUT if self._is_cut else LATE, seconds, f"killed after {seconds:.0f} s: {why}")
        reason = self._last_line().removeprefix(_ERROR)
        # a command whose results say what failed ends with 1, and pytest with 5 if it has nothing to do
        if code == 0 or (code in (1, 5) and self.output.exists() and reason == self._last_line()):
            return self.ended(DONE, seconds)
        return self.ended(FAILED, seconds, f"{describe_exit(code or 0)}: {reason}")

    def ended(self, status: str, seconds: float = 0.0, error: str = "") -> Ended:
        """Returns the end with a status."""
        job, path = self.job, f"results/{self.job.file_name}{self.job.results}"
        tail = self._lines()[-_TAIL_LINES:] if status in (FAILED, LATE, CUT) else []
        return Ended(job.name, job.part, redact_text(job.shown), status, seconds, path, error, tail)

    def kill(self) -> None:
        """Ends the process, and what it has started and left behind."""
        kill_group(self._process)
        self._process.wait()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        redact_file(self.log)

    def _lines(self) -> list[str]:
        """Returns the lines that this process has written to the log."""
        with self.log.open(encoding="utf-8", errors="replace") as log:
            log.seek(self._log_start)
            return log.read().splitlines()

    def _last_line(self) -> str:
        return redact_text(next((line.strip() for line in reversed(self._lines()) if line.strip()), "no output"))


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; empty if the file is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
