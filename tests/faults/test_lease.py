"""Two jobs in one directory: only the holder of the lease commits (F13)."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
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
from dtrain.cli.resolve import compose
from dtrain.config.schema import RunConfig
from dtrain.distributed.setup import make_communicator
from dtrain.errors import CheckpointError, DtrainError
from dtrain.train.run import run_training
from tests.helpers.checkpoints import ALONE, assert_holds, make_tensors, save_good, shards_of
from tests.helpers.fault_counts import FEW_AND_MANY, FaultCounts
from tests.helpers.launch import LAUNCHER, SMALL, Record, checkpoints, record_of, write_samples
from tests.helpers.mishap import Mishap
from tests.helpers.ranks import fork, run_ranks

# heartbeat, limit, poll in seconds
LONG_LIMIT = (0.05, 120.0, 0.02)
SHORT_LIMIT = (0.05, 0.6, 0.02)  # for a job that takes over from a stopped one


def stale(token: int) -> bytes:
    """The lease of a process on another host, which nobody here can ask."""
    return replace(Holder.this_process(token), host="elsewhere", boot_id="other").encode()


def _train(config: RunConfig, env: dict[str, str], log: Path, timing: tuple[float, float, float]) -> None:
    for name in LAUNCHER:
        os.environ.pop(name, None)
    os.environ.update(env)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), 2)
    lease.TIMING = LeaseTiming(*timing)
    try:
        code = run_training(config)
    except DtrainError as error:
        print(f"dtrain: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    sys.exit(code)


class Job:
    """A training run in ``run_dir`` in a process of its own, with a fault if any."""

    def __init__(self, run_dir: Path, config: RunConfig, mishap: Mishap | None, timing: Any) -> None:
        self._log = Path(f"{run_dir}.{time.monotonic()}.log")
        self._log.touch()
        config = replace(config, run_dir=str(run_dir))
        self.process = fork(_train, config, mishap.env() if mishap else {}, self._log, timing)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def output(self) -> str:
        return self._log.read_text()

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int | None:
        self.process.join(180)
        return self.process.exitcode

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 180
        while not condition():
            assert time.monotonic() < deadline, self.output
            assert self.process.exitcode is None or condition(), self.output
            time.sleep(0.005)

    def wait_until_stopped(self) -> None:
        status = Path(f"/proc/{self.pid}/stat")
        self.wait_until(lambda: status.read_text().rpartition(")")[2].split()[0] == "T")


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    """Starts jobs; kills those that still run at the end."""
    started: list[Job] = []

    def start(run_dir: Path, config: RunConfig, mishap: Mishap | None = None, timing: Any = LONG_LIMIT) -> Job:
        started.append(Job(run_dir, config, mishap, timing))
        return started[-1]

    yield start
    for job in started:
        job.process.kill()
        job.process.join()


def lingering(run_dir: Path) -> tuple[Mishap, Callable[[], None]]:
    """Returns a fault that keeps a finished job, and so its lease, until the returned function is called."""
    file = Path(f"{run_dir}.release")
    return Mishap("summary", 1, "sleep", until=str(file)), file.touch


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    brief = ("train.steps=8", "train.save_every=2", "train.eval_every=0")
    return compose([*SMALL, write_samples(tmp_path_factory.mktemp("data")), *brief])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, config: RunConfig) -> Record:
    """Result of a single job."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert Job(run_dir, config, None, LONG_LIMIT).wait() == 0
    assert checkpoints(run_dir) == ["step-00000006", "step-00000008"], "and no lease"
    return record_of(run_dir)


def test_second_job_is_refused_while_the_first_runs(
    tmp_path: Path, config: RunConfig, whole: Record, start: Callable[..., Job]
) -> None:
    run_dir = tmp_path / "run"
    lingers, release = lingering(run_dir)
    first = start(run_dir, config, lingers)
    first.wait_until(lambda: "step-00000002" in checkpoints(run_dir))
    second = start(run_dir, config)
    assert second.wait() == 2
    assert re.search(rf"dtrain: run_dir=\S+ is not free: \S+ is in use by process {first.pid} on ", second.output)
    assert len([line for line in second.output.splitlines() if line.startswith("dtrain: ")]) == 1
    release()
    assert first.wait() == 0
    assert record_of(run_dir) == whole


@pytest.mark.exhaustive
def test_killed_and_started_again(tmp_path: Path, config: RunConfig, whole: Record, start: Callable[..., Job]) -> None:
    """The new job takes over at once despite the long limit: the old process is known to have ended."""
    run_dir = tmp_path / "run"
    assert start(run_dir, config, Mishap("rename", 2)).wait() == -signal.SIGKILL
    assert "lease-00000001.json" in checkpoints(run_dir)
    second = start(run_dir, config)
    assert second.wait() == 0
    assert "which has ended" in second.output
    assert checkpoints(run_dir) == ["step-00000006", "step-00000008"]
    assert record_of(run_dir) == whole


# where the first job is stopped: between two saves; in a save while it writes, before the check of the lease, and
# between that check and the rename
STOPS = [
    pytest.param("update", 3, marks=pytest.mark.exhaustive),
    pytest.param("write", 10, marks=pytest.mark.exhaustive),
    pytest.param("sync_directory", 5, marks=pytest.mark.exhaustive),
    ("rename", 1),
]


@pytest.mark.parametrize(("place", "count"), STOPS)
def test_stopped_for_long_and_continued(
    tmp_path: Path, config: RunConfig, whole: Record, start: Callable[..., Job], place: str, count: int
) -> None:
    """The unfinished save of the stopped job is removed, its next commit is refused, and it exits with that error."""
    run_dir = tmp_path / "run"
    lingers, release = lingering(run_dir)
    first = start(run_dir, config, Mishap(place, count, "SIGSTOP"))
    first.wait_until_stopped()
    second = start(run_dir, config, lingers, SHORT_LIMIT)
    second.wait_until(lambda: "step-00000006" in checkpoints(run_dir))
    second.send(signal.SIGSTOP)
    second.wait_until_stopped()
    assert f"no heartbeat from process {first.pid} on " in second.output
    names = checkpoints(run_dir)
    first.send(signal.SIGCONT)
    assert first.wait() == 1
    assert re.search(rf"was taken over from this process, .* by process {second.pid} on ", first.output)
    assert set(names) <= set(checkpoints(run_dir)), "it changes nothing there"
    release()
    second.send(signal.SIGCONT)
    assert second.wait() == 0
    assert verify(run_dir).ok
    assert checkpoints(run_dir) == ["step-00000006", "step-00000008"]
    assert record_of(run_dir) == whole


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


def _take_stale_lease(directory: Path, ready: int, over: int, results: int) -> None:
    os.read(ready, 1)  # returns when the parent has closed it
    try:
        with hold(directory, LeaseTiming(0.02, 1.0, 0.001)):
            os.write(results, b"1")
            os.read(over, 1)  # the others have seen a heartbeat
    except CheckpointError:
        os.write(results, b"0")


@FEW_AND_MANY
def test_one_of_several_processes_takes_a_stale_lease(tmp_path: Path, many: bool, faults: FaultCounts) -> None:
    rounds = faults.count(ci=10, full=100) if many else 1
    for number in range(rounds):
        directory = tmp_path / str(number)
        directory.mkdir()
        path_of(directory, 5).write_bytes(stale(5))
        (ready, go), (over, end), (outcomes, results) = (os.pipe() for _ in range(3))
        pids = []
        for _ in range(4):
            if (pid := os.fork()) == 0:
                os.close(go)
                os.close(end)
                _take_stale_lease(directory, ready, over, results)
                os._exit(0)
            pids.append(pid)
        os.close(go)
        assert sorted(os.read(outcomes, 1) for _ in pids) == [b"0", b"0", b"0", b"1"]
        os.close(end)
        for pid in pids:
            os.waitpid(pid, 0)
        assert list(directory.iterdir()) == []
        for descriptor in (ready, over, outcomes, results):
            os.close(descriptor)
    faults.passed("F13", rounds)


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
