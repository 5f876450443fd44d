"""Runs the jobs of an acceptance until its time is over, and keeps all results on disk at every moment. No torch."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dtrain.config.dump import from_plain
from dtrain.config.tool_schema import AcceptConfig
from dtrain.distributed.logging import logger
from dtrain.errors import ConfigError, DtrainError, directory_error, nearest
from dtrain.measure.accept.archive import use_caches, write_archive, write_caches
from dtrain.measure.accept.job import DONE, FAILED, UNDER_WAY, Ended, PartJob, Running, read_json
from dtrain.measure.accept.lines import read_lines
from dtrain.measure.accept.page import Acceptance, render
from dtrain.measure.accept.table import LIMITS_S, PARTS, Machine, Plan, make_plan
from dtrain.redaction.redact import redact_text
from dtrain.telemetry.metrics import write_atomically, write_json
from dtrain.version import package_version, version

RESULTS_FILE, PAGE_FILE, CACHES, TRACES = "accept.json", "accept.md", "caches", "traces"
_POLL_S, _WRITE_S = 0.05, 1.0
_LEAST_S = {"cuda": 12.0, "cpu": 2.0}  # a job is not begun with less time
_END_S = {"cuda": 8.0, "cpu": 4.0}  # for the last page and archives
_PACKAGES = ("torch", "triton", "deepspeed", "transformers", "torchao")
_SHOWN = 400  # characters of a line on the console


def accept(config: AcceptConfig, command: str, folder: Path, age_s: float) -> Acceptance:
    """Runs the jobs that are not done in ``folder``; page, results and archive are written after each partial result.

    Args:
        config: of the command.
        command: line for the page.
        folder: of the results.
        age_s: seconds since the start of the process, which ``limit_s`` counts too.

    Raises:
        ConfigError: a value that cannot be honored.
    """
    start = time.monotonic() - age_s
    limit_s = config.limit_s or LIMITS_S[config.goal]
    check_parts(config.parts)
    facts = _describe_machine(config.device)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise directory_error("out", folder, error) from error
    caches = Path(config.caches) if config.caches else None
    use_caches(folder / CACHES, caches)
    gib = (facts.get("memory_gib") or 79.0) if facts["device"] == "cuda" else 0.0
    machine = Machine(facts["device"], gib, str(facts.get("name", "")))
    plan = make_plan(
        config.goal,
        machine,
        limit_s,
        parts=config.parts,
        has_caches=caches is not None and caches.exists(),
        traces=str((folder / TRACES).absolute()) if config.keep_trace else None,
    )
    empty = Acceptance(command, time.strftime("%Y-%m-%dT%H:%M:%S"), config.goal, limit_s, facts, left_out=plan.left_out)
    archive = Path(config.archive) if config.archive else None
    runner = JobRunner(empty, plan, folder, start + limit_s - _END_S[machine.device], archive)
    try:
        runner.together(plan.together, start + plan.together_s)
        if plan.together and caches is not None:
            write_caches(caches)
        runner.alone(plan.alone)
        if caches is not None:
            write_caches(caches)
    finally:
        runner.stop()
    return runner.write()


def check_parts(names: Sequence[str] | None) -> None:
    """Raises ConfigError if ``names`` has none, or one that is no part."""
    for name in names or ():
        if name not in PARTS:
            raise ConfigError(f"parts: '{name}' is none of {', '.join(PARTS)}{nearest(name, PARTS)}")
    if names is not None and not names:
        raise ConfigError(f"parts=[] names no part; the parts are {', '.join(PARTS)}")


def _describe_machine(device: str) -> dict[str, Any]:
    """Returns the device and what its driver says, without torch: the import may take a minute on a new machine."""
    found = driver_facts() if device != "cpu" else {}
    if device == "cuda" and not found:
        raise ConfigError("device=cuda, but nvidia-smi shows no GPU: install the driver, or see CUDA_VISIBLE_DEVICES")
    installed = {name: number for name in _PACKAGES if (number := package_version(name)) is not None}
    packages = {"dtrain": version(), "python": sys.version.split()[0], **installed}
    return {"device": "cuda" if found else "cpu", **found, "packages": packages}


def driver_facts() -> dict[str, Any]:
    """Returns name, memory, driver, power limit and clock of the first visible GPU by nvidia-smi; empty without one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if not visible or visible == "-1":
        return {}
    fields = ("name", "memory.total", "driver_version", "power.limit", "clocks.max.sm")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "-i", visible]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.splitlines()[0].split(",")] if done.stdout.strip() else []
    if len(values) != len(fields):
        return {}
    numbers = [float(value) if value.replace(".", "", 1).isdigit() else None for value in values]
    memory = numbers[1]
    return {
        "name": values[0],
        "memory_gib": round(memory / 1024, 1) if memory else None,
        "driver": values[2],
        "power_limit_w": numbers[3],
        "max_sm_clock_mhz": numbers[4],
    }


class JobRunner:
    """The jobs under way and those that have ended.

    Args:
        empty: facts of the acceptance.
        plan: all jobs; those that ``folder`` has, of the same machine and versions, are not repeated.
        folder: of the results.
        deadline: of ``time.monotonic``; nothing runs after it.
        archive: file that always has what ``folder`` has; None: none.
    """

    def __init__(self, empty: Acceptance, plan: Plan, folder: Path, deadline: float, archive: Path | None) -> None:
        self._empty, self._folder, self._deadline, self._archive = empty, folder, deadline, archive
        self._device = empty.machine["device"]
        self._fingerprint = {key: value for key, value in empty.machine.items() if "clock" not in key}
        self._ended: dict[str, Ended] = {}
        self._shown: set[str] = set()
        self._waiting = {job.name: "not begun" for job in plan.jobs}
        self._running: list[Running] = []
        self._starts: Counter[str] = Counter()
        self._begun: set[str] = set()
        self._written = 0.0
        self._changes: dict[Path, float] = {}
        (folder / "jobs").mkdir(exist_ok=True)
        for path in sorted((folder / "jobs").glob("*.json")):
            self._read(path)
        self.write()

    def _read(self, path: Path) -> None:
        try:
            found = from_plain(Ended, read_json(path))
        except (DtrainError, KeyError, TypeError):
            return
        if found.fingerprint != self._fingerprint:
            logger.warning("%s: measured on another machine or with other versions", found.name)
            return
        # tests that have begun are not repeated, because they may have ended their process; but not if that was killed
        if found.status in (DONE, FAILED) or not found.results.endswith(".jsonl"):
            self._begun.add(found.name)
        if found.status != DONE:
            return
        self._ended[found.name] = found
        if self._waiting.pop(found.name, None):
            logger.info("%s: done before", found.name)

    def together(self, jobs: Sequence[PartJob], deadline: float) -> None:
        """Runs the jobs side by side until ``deadline``: engines and tests at once, compilers as places get free."""
        queue = [job for job in jobs if job.name in self._waiting]
        places = 2 if self._device == "cpu" else max(1, sum(job.part != "compiled" for job in queue))
        while queue or self._running:
            left_s = min(deadline, self._deadline) - time.monotonic()
            while queue and len(self._running) < places and left_s > _LEAST_S[self._device]:
                self._start(queue.pop(0)).send(left_s)
            if queue and left_s <= _LEAST_S[self._device]:
                self._waiting |= {job.name: "no time left" for job in queue}
                queue = []
            for running in list(self._running):
                if (ended := running.poll()) is not None:
                    queue[:0] = self._end(running, ended)
            self._tick()

    def alone(self, jobs: Sequence[PartJob]) -> None:
        """Runs the jobs one after the other; the process of the next one imports and waits meanwhile."""
        queue = [job for job in jobs if job.name in self._waiting]
        ready: Running | None = None
        while queue:
            job = queue.pop(0)
            left_s = self._deadline - time.monotonic()
            if left_s < _LEAST_S[self._device]:
                self._waiting |= {found.name: "no time left" for found in (job, *queue)}
                return
            current = ready if ready is not None and ready.job == job else self._start(job)
            current.send(left_s)
            # what measures the host's time has the host for itself
            ready = self._start(queue[0]) if queue and job.part != "streams" else None
            while (ended := current.poll()) is None:
                self._tick()
            queue[:0] = self._end(current, ended)
            if ready is not None and ready.job != queue[0]:
                self._running.remove(ready)
                ready.kill()
                ready = None

    def _start(self, job: PartJob) -> Running:
        self._starts[job.name] += 1
        # what was found on this machine, with these versions, may be continued
        running = Running(job, self._folder, continues=job.name in self._begun)
        self._begun.add(job.name)
        self._running.append(running)
        return running

    def _end(self, running: Running, ended: Ended) -> list[PartJob]:
        """Keeps and prints what a job has found; returns it again if it shall do what its crash has left."""
        job = running.job
        self._running.remove(running)
        ended = replace(ended, fingerprint=self._fingerprint)
        self._ended[ended.name] = ended
        self._waiting.pop(ended.name, None)
        write_json(self._folder / "jobs" / f"{job.file_name}.json", asdict(ended), indent=1)
        logger.info(
            "%s: %s, %.0f s%s", ended.name, ended.status, ended.seconds, f": {ended.error}" if ended.error else ""
        )
        self.write()
        lines = read_lines(ended, self._folder)
        for line in [*lines.conclusions, *(f"FAILED {line}" for line in lines.failures)]:
            if line not in self._shown:  # those of an earlier start are not new
                self._shown.add(line)
                logger.info("  %s", redact_text(line)[:_SHOWN])
        is_crash = ended.status == FAILED and running.output.exists()
        return [job] if is_crash and self._starts[job.name] < job.starts else []

    def _tick(self) -> None:
        time.sleep(_POLL_S)
        if time.monotonic() - self._written > _WRITE_S and self._has_changed():
            self.write()

    def _has_changed(self) -> bool:
        changes = {run.output: run.output.stat().st_mtime for run in self._running if run.output.exists()}
        has_changed = changes != self._changes
        self._changes = changes
        return has_changed

    def write(self) -> Acceptance:
        """Writes results, page and archive, with what the jobs under way have found so far."""
        under_way = [run.ended(UNDER_WAY) for run in self._running if run.has_begun and run.output.exists()]
        known = {found.name for found in under_way}
        not_run = {name: reason for name, reason in self._waiting.items() if name not in known}
        ended = [found for found in self._ended.values() if found.name not in known]
        acceptance = replace(self._empty, ended=[*ended, *under_way], not_run=not_run)
        write_json(self._folder / RESULTS_FILE, acceptance.as_plain(self._folder), indent=1)
        write_atomically(self._folder / PAGE_FILE, redact_text(render(acceptance, self._folder)))
        if self._archive is not None:
            # secrets are removed from a log when its job has ended
            logs = {str(run.log.relative_to(self._folder)) for run in self._running}
            write_archive(self._archive, self._folder, leave_out={CACHES, TRACES, *logs})
        self._written = time.monotonic()
        return acceptance

    def stop(self) -> None:
        """Ends every process."""
        for running in self._running:
            running.kill()
        self._running = []
