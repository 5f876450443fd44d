"""Two jobs in one directory, in processes of their own: only the holder of the lease commits (F13).

``tests/unit/checkpoint/lease`` has every order of events, with a simulated clock.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtrain.checkpoint import Snapshot, open_newest, save, storage, verify
from dtrain.checkpoint.lease import lease
from dtrain.checkpoint.lease.lease import LeaseTiming, hold
from dtrain.checkpoint.lease.lease_file import Holder, path_of, read_lease
from dtrain.distributed.setup import make_communicator
from dtrain.errors import CheckpointError
from tests.faults.test_checkpoint_crash import Call, Seam
from tests.helpers.checkpoints import ALONE, assert_holds, make_tensors, save_good, shards_of
from tests.helpers.fault_counts import FEW_AND_MANY, FaultCounts
from tests.helpers.ranks import fork, run_ranks


def stale(token: int) -> bytes:
    """The lease of a process on another host, which nobody here can ask."""
    return replace(Holder.this_process(token), host="elsewhere", boot_id="other").encode()


def _save_steps(path: Path, steps: Sequence[int], stop_at: str, limit_s: float) -> None:
    """Saves steps while it holds the lease; stops itself at a call in the second save, or else lingers at the end."""
    directory, seen = path.with_name("checkpoints"), 0

    def act(index: int, call: Call) -> None:
        nonlocal seen
        function, (target, *_) = call
        if isinstance(target, Path) and stop_at and f"{function} {target.name}".startswith(stop_at):
            seen += 1
            if seen == 2:
                os.kill(os.getpid(), signal.SIGSTOP)

    Seam(pytest.MonkeyPatch(), act)
    try:
        with hold(directory, LeaseTiming(heartbeat_s=0.05, limit_s=limit_s, poll_s=0.02)):
            for step in steps:
                save_good(directory, step, 1)
            path.with_suffix(".saved").touch()
            while not path.with_suffix(".release").exists():
                time.sleep(0.01)
    except (CheckpointError, AssertionError) as error:
        path.with_suffix(".log").write_text(str(error))
        sys.exit(1)


class Job:
    """A process that saves steps in a directory until it is released; ``stop_at`` is the call that stops it."""

    def __init__(self, path: Path, steps: Sequence[int], stop_at: str = "", limit_s: float = 120.0) -> None:
        self._log, self._saved, self._release = (path.with_suffix(f".{end}") for end in ("log", "saved", "release"))
        self.process = fork(_save_steps, path, steps, stop_at, limit_s)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 180
        while not condition():
            assert time.monotonic() < deadline
            assert self.process.exitcode is None, self._log.read_text()
            time.sleep(0.005)

    def wait_until_saved(self) -> None:
        self._wait_until(self._saved.exists)

    def wait_until_stopped(self) -> None:
        status = Path(f"/proc/{self.pid}/stat")
        self._wait_until(lambda: status.read_text().rpartition(")")[2].split()[0] == "T")

    def end(self, *numbers: signal.Signals) -> tuple[int | None, str]:
        """Sends signals, releases it and waits; returns its exit code and error."""
        self._release.touch()
        for number in numbers:
            os.kill(self.pid, number)
        self.process.join(180)
        return self.process.exitcode, self._log.read_text() if self._log.exists() else ""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts jobs in one directory; kills those that still run at the end."""
    started: list[Job] = []

    def start(*steps: int, **options: Any) -> Job:
        started.append(Job(tmp_path / f"job{len(started)}", steps, **options))
        return started[-1]

    yield start
    for job in started:
        job.process.kill()
        job.process.join()


# where the first job is stopped in its second save: while it writes, before the check of the lease, and between that
# check and the rename
STOPS = [
    pytest.param("create manifest", marks=pytest.mark.exhaustive),
    pytest.param("sync_directory step-", marks=pytest.mark.exhaustive),
    "rename step-",
]


@pytest.mark.parametrize("stop_at", STOPS)
def test_stopped_for_long_and_continued(tmp_path: Path, start: Callable[..., Job], stop_at: str) -> None:
    """The unfinished save of the stopped job is removed, its next commit is refused, and it ends with that error."""
    directory = tmp_path / "checkpoints"
    first = start(100, 200, 300, stop_at=stop_at)
    first.wait_until_stopped()
    second = start(400, 500, limit_s=0.6)
    second.wait_until_saved()
    names = sorted(path.name for path in directory.iterdir())
    code, error = first.end(signal.SIGCONT)
    assert code == 1
    assert re.search(rf"was taken over from this process, .* by process {second.pid} on |No such file", error)
    assert sorted(path.name for path in directory.iterdir()) == names, "it changes nothing there"
    assert second.end() == (0, "")
    assert verify(directory).ok
    assert sorted(path.name for path in directory.iterdir()) == ["step-00000400", "step-00000500"]


# -- many at once ------------------------------------------------------------------------------------------------------


def _hold_repeatedly(directory: Path, log: int, rounds: int, seed: int) -> None:
    """Takes the lease ``rounds`` times and logs it; is sometimes killed while it holds the lease."""
    dice = random.Random(seed)
    pid = os.getpid()
    done = 0
    while done < rounds:
        try:
            with hold(directory, LeaseTiming(0.01, 30.0, 0.001)) as held:
                held.check()
                os.write(log, f"{pid} acquired\n".encode())
                time.sleep(dice.random() * 0.004)
                held.check()
                os.write(log, f"{pid} released\n".encode())
                if dice.random() < 0.1:
                    os.kill(pid, signal.SIGKILL)
            done += 1
        except CheckpointError as error:
            if "in use by process" not in str(error):
                raise
    os.write(log, f"{pid} is done\n".encode())


@FEW_AND_MANY
def test_one_holder_among_many_processes(tmp_path: Path, many: bool, faults: FaultCounts) -> None:
    """One acquires it at a time, and whoever dies with it is followed at once."""
    num_holdings = 0
    for number in range(faults.count(ci=3, full=20) if many else 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        log = os.open(folder / "log", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        pids = []
        for seed in range(4 * number, 4 * number + 4):
            if (pid := os.fork()) == 0:
                _hold_repeatedly(folder / "checkpoints", log, 15, seed)
                os._exit(0)
            pids.append(pid)
        for pid in pids:
            os.waitpid(pid, 0)
        os.close(log)
        events = [line.split(maxsplit=1) for line in (folder / "log").read_text().splitlines()]
        holdings = [(int(pid), event) for pid, event in events if event != "is done"]
        assert {pid for pid, _ in holdings} == set(pids)
        for (one, taken), (other, left) in zip(holdings[::2], holdings[1::2], strict=True):
            assert (taken, left) == ("acquired", "released")
            assert one == other
        state = read_lease(folder / "checkpoints")
        assert state is None or (state.holder is not None and state.holder.has_ended())
        num_holdings += len(holdings) // 2
    assert num_holdings >= 15
    faults.passed("F13", num_holdings)


# -- the check at the commit -------------------------------------------------------------------------------------------


def test_a_save_that_has_lost_the_lease_is_not_committed(tmp_path: Path) -> None:
    """Another job has just taken over and has not cleaned up yet: only the check prevents the commit."""
    save_good(tmp_path, 100, 1)
    real = storage.sync_directory

    def take_over(path: Path) -> None:
        real(path)
        if ".tmp-" in path.name:
            path_of(tmp_path, 2).write_bytes(stale(2))
            path_of(tmp_path, 1).unlink()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "sync_directory", take_over)
        with pytest.raises(CheckpointError, match=r"taken over from this process, .*, by process \d+ on elsewhere"):
            save(tmp_path, Snapshot(200, shards_of(make_tensors(200), 0, 1), {}), ALONE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lease-00000002.json", "step-00000100"]
    assert_holds(open_newest(tmp_path, ALONE), make_tensors(100))


def test_old_checkpoints_are_not_removed_without_the_lease(tmp_path: Path) -> None:
    for step in (100, 200):
        save_good(tmp_path, step, 1)
    real = storage.sync_directory

    def take_over(path: Path) -> None:
        real(path)
        if path == tmp_path:
            path_of(tmp_path, 2).write_bytes(stale(2))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "sync_directory", take_over)
        save_good(tmp_path, 300, 1)
    steps = [path.name for path in sorted(tmp_path.iterdir()) if path.name.startswith("step-")]
    assert steps == ["step-00000100", "step-00000200", "step-00000300"]


def _save_with_short_collectives(rank: int, world: int, directory: Path) -> Path:
    """Saves with collectives that time out after 2.5 s."""
    comm = make_communicator(dist.new_group(backend="gloo", timeout=timedelta(seconds=2.5)), torch.device("cpu"))
    lease.TIMING = LeaseTiming(limit_s=3.5, poll_s=0.1)
    return save(directory, Snapshot(100, shards_of(make_tensors(100), rank, world), {}), comm)


def test_a_save_waits_for_a_stale_lease_longer_than_a_collective_may_take(tmp_path: Path) -> None:
    path_of(tmp_path, 1).write_bytes(stale(1))
    assert run_ranks(2, _save_with_short_collectives, tmp_path) == [tmp_path / "step-00000100"] * 2
    assert verify(tmp_path).ok
