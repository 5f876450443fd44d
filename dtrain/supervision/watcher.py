"""The process that watches the ranks of one host, and ends them when they hang. Imports no torch.

Local rank 0 starts it in a session of its own, so that it outlives whatever happens to that rank. It reads a job, one
line of JSON, from standard input; a later line names the directory of the run's failures. It ends when the run is over
on all ranks or their processes have ended, and leaves nothing behind: the records are files without a name.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from dtrain.distributed.processes import open_descriptor, process_start, process_status
from dtrain.distributed.progress import RECORD_BYTES, Phase, ProgressRecord
from dtrain.supervision.hang import (
    STOPPED,
    Hang,
    PhaseLimits,
    RankState,
    describe_crash,
    find_failure_elsewhere,
    find_hang,
    with_silent_hosts,
)
from dtrain.supervision.links import HostLinks
from dtrain.supervision.member import Member, WatchJob

HANG_FILE = "hang.json"
POLL_S = 0.25

_OVERSLEPT_S = 3.0  # a watcher that was not scheduled for longer cannot know what the ranks did
_STACKS_S = 0.4  # for the ranks to write their stacks
_WRITE_S = 0.5  # for the files of a hang, whose storage may be what hangs
_TERM_S = 0.7  # between SIGTERM and SIGKILL
_CLOSING_S = 1.0  # between the ends of the ranks of a short run
_FIRST_S = 0.15  # launchers name the rank that ends first, so those at fault do
_SILENCE_S = 2.5  # of another host, before it is named beside ranks that hang here
_TRACED = "t"
_DEBUGGERS = re.compile(rb'File "[^"]*\b(bdb|pydevd|debugpy)\b')


class WatchedRank:
    """A rank's record and its process, which may have ended already.

    Raises:
        OSError: the process does not let this one see its files.
    """

    def __init__(self, member: Member, now: float) -> None:
        self.member = member
        self.process: int | None = None
        self.record = ProgressRecord(0, Phase.START, 0, 0, 0, "", num_steps=0)
        self.changed_at = now
        self.ended_at: float | None = None
        self._memory: memoryview | None = None
        self._stacks: int | None = None
        try:
            self._open()
        except OSError:
            if not self.has_ended():
                raise
        if self.has_ended():  # the number may be another process by now
            self.process, self.ended_at = None, now

    def _open(self) -> None:
        member = self.member
        with suppress(OSError, AttributeError):  # missing in old kernels and in some sandboxes
            self.process = os.pidfd_open(member.pid)
        descriptor = open_descriptor(member.pid, *member.record, os.O_RDONLY)
        self._memory = memoryview(mmap.mmap(descriptor, RECORD_BYTES, prot=mmap.PROT_READ))
        os.close(descriptor)
        self.record = ProgressRecord.read(self._memory)
        if member.stacks is not None:
            self._stacks = open_descriptor(member.pid, *member.stacks, os.O_RDONLY)

    def read(self, now: float, limits: PhaseLimits) -> None:
        """Reads the record, and learns how long the rank took if it has changed."""
        if self._memory is None:
            return
        record = ProgressRecord.read(self._memory)
        if (record.num_changes, record.left) != (self.record.num_changes, self.record.left):
            limits.learn(self.record, now - self.changed_at)
            self.changed_at = now
        self.record = record

    def state(self, now: float, *, is_late: bool) -> RankState:
        letter = "S" if self.ended_at is None else ""
        if is_late and letter and (status := process_status(str(self.member.pid))) is not None:
            letter = status.state
        ended_s = 0.0 if self.ended_at is None else now - self.ended_at
        return RankState(self.member.rank, self.member.pid, self.record, now - self.changed_at, letter, ended_s)

    def has_ended(self) -> bool:
        """Whether the process has ended; a zombie has."""
        return process_start(str(self.member.pid)) != self.member.start

    def send(self, number: signal.Signals) -> None:
        with suppress(OSError):
            if self.process is not None:
                signal.pidfd_send_signal(self.process, number)
            elif not self.has_ended():
                os.kill(self.member.pid, number)

    @property
    def writes_stacks(self) -> bool:
        return self._stacks is not None

    def stacks(self) -> bytes:
        """Returns what the rank has written so far."""
        return b"" if self._stacks is None else os.pread(self._stacks, 1 << 24, 0)


class Watcher:
    """Watches the ranks of a job until they have ended, or ends them.

    Args:
        job: see there.
        clock: monotonic time in seconds.
    """

    def __init__(self, job: WatchJob, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limits = PhaseLimits(*job.limits_s)
        self._has_other_hosts = job.world_size > len(job.members)
        self.failures: Path | None = None  # directory of the run's failures, once it is known
        self._polled_at = clock()
        self._ranks = [WatchedRank(member, self._polled_at) for member in job.members]
        self._links: HostLinks | None = None
        self._has_reported = False  # a crash
        if job.link is not None:
            try:
                self._links = HostLinks(job.link, self._polled_at)
            except OSError as error:
                say(
                    f"{job.link.hosts[job.link.index]} cannot reach the watcher of {job.link.hosts[0]} at "
                    f"{job.link.address}, so the hosts do not watch each other: {error}; set GLOO_SOCKET_IFNAME to the "
                    "network interface that connects them"
                )

    def run(self, orders: IO[bytes]) -> None:
        """Watches until the run is over; ``orders``, which is unbuffered, names the directory of its failures."""
        poller = select.poll()
        poller.register(orders, select.POLLIN)
        by_process = {rank.process: rank for rank in self._ranks if rank.process is not None and rank.ended_at is None}
        for process in by_process:
            poller.register(process, select.POLLIN)
        self._polled_at = self._clock()
        while not self.is_over():
            for descriptor, _ in poller.poll(1000 * POLL_S):
                if descriptor in by_process:
                    by_process[descriptor].ended_at = self._clock()
                    poller.unregister(descriptor)
                elif line := orders.readline():
                    self.failures = Path(json.loads(line))
                else:  # local rank 0 has ended its run, or has ended
                    poller.unregister(descriptor)
            if (hang := self.poll()) is not None:
                self.end(hang)
                break
        else:
            self._report_crash(self._states(self._clock()))
        if self._links is not None:
            self._links.close()

    def is_over(self) -> bool:
        """Whether nothing is left to watch."""
        return all(rank.ended_at is not None or rank.record.has_ended for rank in self._ranks)

    def poll(self) -> Hang | None:
        """Reads all records; returns the hang, if there is one."""
        now = self._clock()
        overslept = now - self._polled_at > POLL_S + _OVERSLEPT_S
        self._polled_at = now
        for rank in self._ranks:
            has_ended = rank.process is None and rank.ended_at is None and rank.has_ended()
            rank.read(now, self._limits)  # after that, so that it is the last record
            if has_ended:
                rank.ended_at = now
        if overslept:
            self._restart_clocks(now)
        states = self._states(now)
        self._report_crash(states)
        if any(state.state == _TRACED for state in states):  # a debugger holds it
            self._restart_clocks(now)
            return None
        hang = find_hang(states, self._limits, has_other_hosts=self._has_other_hosts)
        if self._links is None:
            return hang
        self._links.poll(now)
        while self._links.notices:
            say(self._links.notices.pop(0))
        if hang is not None:
            return with_silent_hosts(hang, self._links.silent(now, _SILENCE_S), self._links.endings())
        limit = self._limits.of_heartbeats
        silent = self._links.silent(now, limit.seconds)
        return find_failure_elsewhere(states, self._links.reports, silent, limit, now)

    def _report_crash(self, states: Sequence[RankState]) -> None:
        """Reports a rank that has ended without ending its run to the other hosts, once."""
        crash = describe_crash(states)
        if self._links is not None and crash is not None and not self._has_reported:
            self._has_reported = True
            self._links.report(f"on {self._links.here.name}: {crash.message}", crash.culprits, is_crash=True)

    def _states(self, now: float) -> list[RankState]:
        return [rank.state(now, is_late=now - rank.changed_at > self._limits.of(rank.record)) for rank in self._ranks]

    def _restart_clocks(self, now: float) -> None:
        for rank in self._ranks:
            rank.changed_at = now
        if self._links is not None:
            self._links.reset_silence(now)

    # -- the end of a hang ---------------------------------------------------------------------------------------------

    def end(self, hang: Hang) -> None:
        """Writes the stacks and the message of ``hang``, and ends all ranks, those at fault first."""
        found_at = self._clock()
        states = self._states(found_at)
        stacks = self._collect_stacks(states)
        if not hang.is_crash and any(_DEBUGGERS.search(text) for text in stacks.values()):
            say(f"{hang.message}; a debugger runs there, so this run is no longer watched")
            return
        if self._links is not None and not hang.is_crash and not hang.is_reported:
            self._links.report(f"on {self._links.here.name}: {hang.message}", hang.culprits, is_crash=False)
        where = self._write(hang, states, stacks)
        say(f"{hang.message}{' and ends with it' if hang.is_crash else ''}; {where}")
        if not hang.is_crash:
            self._signal(self._ranks, signal.SIGTERM)
            self._wait_for_ends(_TERM_S)
        self._signal([rank for rank in self._ranks if rank.member.rank in hang.culprits], signal.SIGKILL)
        self._wait_for_ends(_FIRST_S)
        self._signal(self._ranks, signal.SIGKILL)

    def _signal(self, ranks: Sequence[WatchedRank], number: signal.Signals) -> None:
        for rank in ranks:
            if not rank.record.has_ended:
                rank.send(number)

    def _wait_for_ends(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not all(map(WatchedRank.has_ended, self._ranks)):
            time.sleep(0.02)

    def _collect_stacks(self, states: Sequence[RankState]) -> dict[int, bytes]:
        """Returns what each rank has written on SIGUSR2; nothing of one that is stopped or blocked in the kernel."""
        asked = [
            rank
            for rank, state in zip(self._ranks, states, strict=True)
            if rank.writes_stacks and state.is_active and state.state != STOPPED
        ]
        self._signal(asked, signal.SIGUSR2)
        deadline = time.monotonic() + _STACKS_S
        before: dict[int, bytes] = {}
        while True:
            time.sleep(0.03)
            stacks = {rank.member.rank: rank.stacks() for rank in asked}
            if (stacks == before and all(stacks.values())) or time.monotonic() > deadline:
                return stacks
            before = stacks

    def _write(self, hang: Hang, states: Sequence[RankState], stacks: dict[int, bytes]) -> str:
        """Writes the files of ``hang``; returns a clause that says where the stacks are."""
        if self.failures is None:
            try:
                for state in states:
                    text = stacks.get(state.rank)
                    heading = f"stack of rank {state.rank}:\n" if text else ""
                    sys.stderr.write(f"{heading}{text.decode(errors='replace') if text else _why_no_stack(state)}")
            except (OSError, ValueError):  # the terminal may be gone
                return "there is no run directory yet, and the stacks could not be printed"
            return "there is no run directory yet, so the stacks are above"
        report = HangReport(hang, states, stacks, self._limits)
        writer = threading.Thread(target=report.write, args=(self.failures,), daemon=True)
        writer.start()
        writer.join(_WRITE_S)
        if report.folder is None:
            return f"the stacks could not be written to {self.failures} ({report.problem or 'the storage hangs'})"
        return f"stacks in {report.folder}"


class HangReport:
    """The files of a hang: ``hang.json``, and the stacks of each rank.

    Attributes:
        folder: where they are; None until they are written.
        problem: why they could not be written.
    """

    def __init__(self, hang: Hang, states: Sequence[RankState], stacks: dict[int, bytes], limits: PhaseLimits) -> None:
        self.folder: Path | None = None
        self.problem = ""
        self._states = states
        self._stacks = stacks
        self._content = {
            "message": hang.message,
            "culprits": list(hang.culprits),
            "ranks": [_to_json(state, limits) for state in states],
        }

    def write(self, failures: Path) -> None:
        try:
            folder = _next_folder(failures)
            for state in self._states:
                text = self._stacks.get(state.rank) or _why_no_stack(state).encode()
                (folder / f"rank-{state.rank}.txt").write_bytes(text)
            (folder / HANG_FILE).write_text(json.dumps(self._content, indent=2) + "\n", encoding="utf-8")
            self.folder = folder
        except OSError as error:
            self.problem = error.strerror or type(error).__name__


def find_hangs(failures: Path) -> list[Path]:
    """Returns the folders of the hangs of a run, the newest last."""
    names = [path.name.removeprefix("hang-") for path in failures.glob("hang-*")]
    numbers = sorted(int(name) for name in names if name.isdecimal())
    return [failures / f"hang-{number}" for number in numbers]


def _next_folder(failures: Path) -> Path:
    """Makes ``hang-N`` with the next free number; another host may make one at the same time."""
    failures.mkdir(exist_ok=True)
    number = len(find_hangs(failures)) + 1
    while True:
        folder = failures / f"hang-{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def _to_json(state: RankState, limits: PhaseLimits) -> dict[str, Any]:
    record = state.record
    return {
        "rank": state.rank,
        "pid": state.pid,
        "phase": record.phase.name.lower(),
        "attempted_steps": record.step,
        "since_s": round(state.unchanged_s, 2),
        "limit_s": round(limits.of(record), 2),
        "state": state.state or None,
        "has_ended": not state.is_active,
        "waits_for": record.label if record.is_waiting else None,
        "collective": record.entered,
    }


def _why_no_stack(state: RankState) -> str:
    if not state.is_active:
        return f"rank {state.rank} (process {state.pid}) has ended\n"
    if state.state == STOPPED:
        return (
            f"rank {state.rank} (process {state.pid}) is stopped by a signal, SIGSTOP or Ctrl-Z (state T in "
            f"/proc/{state.pid}/stat); a stopped process cannot write its stack\n"
        )
    return (
        f"rank {state.rank} (process {state.pid}) wrote no stack within {_STACKS_S:g} s; state {state.state} in "
        f"/proc/{state.pid}/stat (D: the kernel holds it, such as for its storage), or it handles SIGUSR2 itself\n"
    )


def say(text: str) -> None:
    with suppress(OSError, ValueError):  # the terminal may be gone
        print(f"dtrain: {text}", file=sys.stderr, flush=True)


def main() -> None:
    """Watches the job on standard input."""
    watch(open(0, "rb", buffering=0))  # noqa: SIM115 - until this process ends


def watch(orders: IO[bytes]) -> None:
    """Watches the job in ``orders``, which is unbuffered."""
    try:
        watcher = Watcher(WatchJob.decode(orders.readline().decode()))
    except OSError as error:
        if not _run_has_ended(orders):  # else the run was over before this process could open its records
            say(f"this run is not watched: {error}")
        return
    watcher.run(orders)


def _run_has_ended(orders: IO[bytes]) -> bool:
    """Returns whether local rank 0 has ended its run, or does so now: it closes its orders before its record."""
    while select.select([orders], [], [], _CLOSING_S)[0]:
        if not orders.read(1 << 16):
            return True
    return False
