"""Processes that keep a record as ranks do, without training, under a real watcher."""

from __future__ import annotations

import io
import json
import os
import pdb
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

from dtrain.distributed.progress import Phase, Progress
from dtrain.supervision.member import Member, WatchJob, share_progress

LABEL = "reduce(blocks.7, 8 x float32)"


def wait(progress: Progress) -> None:
    """In a collective, for the other ranks, which do not come."""
    time.sleep(600)


def block(progress: Progress) -> None:
    os.read(os.pipe()[0], 1)


def loop(progress: Progress) -> None:
    while True:
        pass


def stop(progress: Progress) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_in_a_wait(progress: Progress) -> None:
    stop(progress)


def ignore_signals(progress: Progress) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(600)


def debug(progress: Progress) -> None:
    class Prompt:
        def readline(self) -> str:
            time.sleep(3)
            return "continue\n"

    pdb.Pdb(stdin=Prompt(), stdout=io.StringIO(), nosigint=True).set_trace()  # type: ignore[arg-type]
    progress.end()


def die(progress: Progress) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def work(progress: Progress) -> None:
    for step in range(20):
        progress.begin(Phase.FORWARD)
        time.sleep(0.1)
        progress.end_step(step)
    progress.end()


def main(rank: str, phase: str, action: str, mark: str) -> None:
    """One process: says who it is, makes progress until there is a line on standard input, and does ``action``."""
    with ExitStack() as held:
        progress = Progress()
        progress.end_step(41)
        progress.begin(Phase.LOAD)  # in no other phase, because a watcher learns how long each takes
        print(json.dumps(asdict(share_progress(int(rank), progress, held))), flush=True)
        while not select.select([sys.stdin], [], [], 0.1)[0]:
            progress.advance()
        progress.begin(Phase[phase])
        if action in (wait.__name__, stop_in_a_wait.__name__):
            progress.enter(7, LABEL)
        Path(mark).touch()  # after the last progress, from which the limit counts
        globals()[action](progress)


class WatchedProcesses:
    """Ranks that do ``actions`` in ``phases`` once they ``begin``; the end of the ``with`` block kills them.

    ``folder`` is made, and gets ``failures/``; ``limit_s`` is each limit of the watcher.
    """

    def __init__(
        self, folder: Path, phases: Sequence[Phase], actions: Sequence[Callable[[Progress], None]], limit_s: float
    ) -> None:
        # imported here, because it imports torch, which the processes do without
        from dtrain.supervision.supervised import Supervision

        folder.mkdir(exist_ok=True)
        self.failures, self._limit_s = folder / "failures", limit_s
        self._marks = [folder / f"mark-{rank}" for rank in range(len(actions))]
        command = [sys.executable, "-m", "tests.helpers.watched"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        start = partial(subprocess.Popen, **pipes, start_new_session=True, cwd=Path(__file__).parents[2])
        who = enumerate(zip(phases, actions, self._marks, strict=True))
        self._processes = [start([*command, str(n), phase.name, act.__name__, mark]) for n, (phase, act, mark) in who]
        self.members: list[Member] = []
        self.supervision = Supervision(Progress())
        self._ended_at = 0.0
        self._ends = threading.Thread(target=self._wait_for_ends, daemon=True)

    def start_watcher(self) -> subprocess.Popen[str]:
        for process in self._processes:
            assert process.stdout is not None
            self.members.append(Member(**json.loads(process.stdout.readline())))
        self.supervision.start_watcher(WatchJob(tuple(self.members), len(self.members), (self._limit_s,) * 3))
        self.supervision.write_failures_to(self.failures)
        assert self.supervision.watcher is not None
        return self.supervision.watcher

    def act(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
        self._ends.start()

    def _wait_for_ends(self) -> None:
        for process in self._processes:
            process.wait()
        self._ended_at = time.time()

    def wait(self, timeout: float = 60.0) -> float:
        """Waits until all ranks have ended; returns the seconds from the start of the hang to the end of the last."""
        self._ends.join(timeout)
        assert self._ended_at, "a rank has not ended"
        assert self.supervision.watcher is not None
        assert self.supervision.watcher.wait(timeout) == 0
        return self._ended_at - max(mark.stat().st_mtime for mark in self._marks)

    @property
    def exit_codes(self) -> list[int | None]:
        return [process.poll() for process in self._processes]

    def __enter__(self) -> WatchedProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        self.supervision.end()


def begin(*groups: WatchedProcesses) -> None:
    """Lets all processes act once all are watched, so that none of them waits for the start of another one."""
    watchers = [group.start_watcher() for group in groups]
    for group, watcher in zip(groups, watchers, strict=True):
        while Path(f"/proc/{watcher.pid}/maps").read_text().count("memfd:dtrain-progress") < len(group.members):
            assert watcher.poll() is None, "the watcher has ended"
            time.sleep(0.01)
    for group in groups:
        group.act()


if __name__ == "__main__":
    main(*sys.argv[1:])
