"""State of a run, from its files: its progress, and whether the run is alive."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dtrain.checkpoint.lease.lease_file import HEARTBEAT_LIMIT_S, LeaseState, read_lease
from dtrain.telemetry.live_view import LiveView
from dtrain.telemetry.metrics import CHECKPOINTS, CONFIG_FILE, METRICS_FILE, RESTARTS_FILE, SUMMARY_FILE
from dtrain.telemetry.progress import RunProgress, Saved, last_checkpoint
from dtrain.telemetry.texts import clean, span
from dtrain.tools.watch.files import LineReader, read_object, read_total_steps, read_unit


class Status(NamedTuple):
    """What a run is doing, in words; ``may_change`` without anybody starting it again."""

    text: str
    style: str
    is_running: bool = False
    may_change: bool = False


class WatchedRun:
    """A run directory that is read again and again; nothing in it is changed.

    Args:
        path: of the run.
        clock: seconds since the epoch.
        elapsed: seconds of a clock that nobody sets.

    Attributes:
        may_change: whether the run was alive, or possibly so, at the last view.
    """

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.time, elapsed: Callable[[], float] = time.monotonic
    ) -> None:
        self.may_change = True
        self._path = path
        self._clock = clock
        self._elapsed = elapsed
        self._lines = LineReader(path / METRICS_FILE)
        self._progress = RunProgress(None)
        self._config_version = 0
        self._lease: LeaseState | None = None
        self._silent_since = 0.0  # of the elapsed clock

    def view(self) -> LiveView:
        """Reads what is new, and returns the state."""
        saved = last_checkpoint(self._path / CHECKPOINTS)
        status = self._status(saved)  # before the lines: what a run logged before it ended is there
        if self._lines.restarted():
            unit, self._progress = self._progress.unit, RunProgress(self._progress.total_steps)
            self._progress.unit = unit
        for line in self._lines.new_lines():
            self._progress.add(line)
        self._read_config()
        self.may_change = status.may_change
        text = status.text
        if status.is_running and not self._progress.has_lines:
            text = f"{text}; waiting for the first logged step"
        name = clean(str(self._path))
        return LiveView(self._progress, name, self._clock(), saved, clean(text), status.style, status.is_running)

    def _read_config(self) -> None:
        try:
            version = (self._path / CONFIG_FILE).stat().st_mtime_ns
        except OSError:
            return
        if version != self._config_version:
            self._config_version = version
            self._progress.total_steps = read_total_steps(self._path / CONFIG_FILE)
            self._progress.unit = read_unit(self._path / CONFIG_FILE)

    def _status(self, saved: Saved | None) -> Status:
        try:
            lease = read_lease(self._path / CHECKPOINTS)
        except OSError:
            lease = None
        if lease is not None and not (lease.holder and lease.holder.has_ended()):
            return self._held(lease)
        summary = read_object(self._path / SUMMARY_FILE)
        total = read_total_steps(self._path / CONFIG_FILE)
        steps = summary.get("steps")
        if summary.get("finished") is True and (total is None or (isinstance(steps, int) and steps >= total)):
            return Status("finished", "green")
        return self._ended(lease, saved)

    def _held(self, lease: LeaseState) -> Status:
        """Returns the status of a run whose lease is held, by a process that may be on another host."""
        now, holder = self._elapsed(), _holder(lease)
        if self._lease is None:  # the first look: the file system's time says how old the heartbeat is
            self._silent_since = now - max(0.0, self._clock() - _modified(lease.path))
        elif (lease.token, lease.data) != (self._lease.token, self._lease.data):
            self._silent_since = now
        self._lease = lease
        silent_s = now - self._silent_since
        if silent_s <= HEARTBEAT_LIMIT_S:
            return Status(f"running: {holder}", "green", is_running=True, may_change=True)
        text = (
            f"seems dead: no heartbeat from {holder} for {span(silent_s)}; if it has ended, {_again(self._path)} "
            f"takes over after {HEARTBEAT_LIMIT_S:g} s"
        )
        return Status(text, "red", may_change=True)

    def _ended(self, lease: LeaseState | None, saved: Saved | None) -> Status:
        """Returns the status of a run that no process holds and that has not finished."""
        attempt = read_object(self._path / RESTARTS_FILE)
        resume = f"{_again(self._path)} " + (
            f"continues from step {saved.step}" if saved else "begins again, because there is no checkpoint"
        )
        if attempt.get("failure"):
            return Status(f"failed: {clean(attempt['failure'])}; {resume}", "red")
        if lease is not None:
            return Status(f"killed: {_holder(lease)} has ended without a message; {resume}", "red")
        if attempt:
            return Status(f"ended without a message, such as by SIGKILL; {resume}", "red")
        return Status(f"stopped; {resume}", "yellow")


def _holder(lease: LeaseState) -> str:
    return f"process {lease.holder.pid} on {lease.holder.host}" if lease.holder else "an unknown process"


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _again(path: Path) -> str:
    return f"the same command with run_dir={shlex.quote(str(path))}"
