"""Processes that keep a record as ranks do, without training, under a real watcher."""

from __future__ import annotations

import io
import json
import os
import pdb
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from dtrain.distributed.progress import Phase, Progress
from dtrain.supervision.member import Member, WatchJob, share_progress

LABEL = "reduce(blocks.7, 8 x float32)"


def wait(progress: Progress) -> None:
    """Waits for the other ranks, which do not come."""
    progress.enter(7, LABEL)
    time.sleep(600)


def block(progress: Progress) -> None:
    os.read(os.pipe()[0], 1)


def loop(progress: Progress) -> None:
    while True:
        pass


def stop(progress: Progress) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_in_a_wait(progress: Progress) -> None:
    progress.enter(7, LABEL)
    os.kill(os.getpid(), signal.SIGSTOP)


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
    """One process: says who it is, waits for a line on standard input, and does ``action``."""
    with ExitStack() as held:
        progress = Progress()
        progress.end_step(41)
        print(json.dumps(asdict(share_progress(int(rank), progress, held))), flush=True)
        sys.stdin.readline()
        progress.begin(Phase[phase])
        Path(mark).touch()
        globals()[action](progress)


class WatchedProcesses:
    """Processes with one action each, and their watcher; what still runs when the ``with`` block ends is killed.

    Args:
        folder: gets ``failures/``.
        phases: phase of each rank.
        actions: what each rank does in it.
        limits_s: of the watcher.
    """

    def __init__(
        self,
        folder: Path,
        phases: Sequence[Phase],
        actions: Sequence[Callable[[Progress], None]],
        limits_s: tuple[float, float, float],
    ) -> None:
        self.failures = folder / "failures"
        # imported here, because it imports torch, which the processes do without
        from dtrain.supervision.supervised import Supervision

        self._marks = [folder / f"mark-{rank}" for rank in range(len(actions))]
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.helpers.watched", str(rank), phase.name, action.__name__, mark],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                cwd=Path(__file__).parents[2],
            )
            for rank, (phase, action, mark) in enumerate(zip(phases, actions, self._marks, strict=True))
        ]
        self.members: list[Member] = []
        for process in self._processes:
            assert process.stdout is not None
            self.members.append(Member(**json.loads(process.stdout.readline())))
        self.supervision = Supervision(Progress())
        self.supervision.start_watcher(WatchJob(tuple(self.members), len(actions), limits_s))
        self.supervision.write_failures_to(self.failures)
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
        self._ended_at = 0.0
        self._ends = threading.Thread(target=self._wait_for_ends, daemon=True)
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        self.supervision.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
