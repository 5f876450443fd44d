"""Two jobs in one directory, in processes of their own: only the holder of the lease commits (F13).

``tests/unit/checkpoint/lease`` has every order of events, with a simulated clock.
"""

from __future__ import annotations

import os
import random
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtrain.checkpoint import Snapshot, open_newest, save, storage, verify
from dtrain.checkpoint.lease import lease
from dtrain.checkpoint.lease.lease import LeaseTiming, hold
from dtrain.checkpoint.lease.lease_file import Holder, path_of, read_lease
from dtrain.distributed.transport.choose import make_communicator
from dtrain.errors import CheckpointError
from tests.helpers.checkpoints import ALONE, assert_holds, make_tensors, save_good, shards_of
from tests.helpers.fault_counts import FEW_AND_MANY, FaultCounts
from tests.helpers.ranks import run_ranks


def stale(token: int) -> bytes:
    """The lease of a process on another host, which nobody here can ask."""
    return replace(Holder.this_process(token), host="elsewhere", boot_id="other").encode()


def _hold_repeatedly(directory: Path, log: int, rounds: int, seed: int) -> None:
    """Takes the lease ``rounds`` times and logs it; is sometimes killed while it holds the lease."""
    dice, pid, done = random.Random(seed), os.getpid(), 0
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
                try:
                    _hold_repeatedly(folder / "checkpoints", log, 15, seed)
                    os._exit(0)
                finally:  # else this process would go on with pytest's other tests
                    traceback.print_exc()
                    os._exit(1)
            pids.append(pid)
        codes = {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids}
        assert codes <= {0, -signal.SIGKILL}
        os.close(log)
        holdings = [line.split() for line in (folder / "log").read_text().splitlines()]
        assert {int(pid) for pid, _ in holdings} == set(pids)
        for (one, taken), (other, left) in zip(holdings[::2], holdings[1::2], strict=True):
            assert (one, taken, left) == (other, "acquired", "released")
        state = read_lease(folder / "checkpoints")
        assert state is None or (state.holder is not None and state.holder.has_ended())
        num_holdings += len(holdings) // 2
    assert num_holdings >= 15
    faults.passed("F13", num_holdings)


@contextmanager
def taken_over(directory: Path, after: str) -> Iterator[None]:
    """Inside, another job has the lease, and has not cleaned up yet, once a directory of that name is durable."""
    real = storage.sync_directory

    def take_over(path: Path) -> None:
        real(path)
        if after in path.name:
            path_of(directory, 2).write_bytes(stale(2))
            path_of(directory, 1).unlink(missing_ok=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "sync_directory", take_over)
        yield


def test_a_save_that_has_lost_the_lease_is_not_committed(tmp_path: Path) -> None:
    """Only the check before the commit prevents it."""
    save_good(tmp_path, 100, 1)
    lost = r"taken over from this process, .*, by process \d+ on elsewhere"
    with taken_over(tmp_path, after=".tmp-"), pytest.raises(CheckpointError, match=lost):
        save(tmp_path, Snapshot(200, shards_of(make_tensors(200), 0, 1), {}), ALONE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lease-00000002.json", "step-00000100"]
    assert_holds(open_newest(tmp_path, ALONE), make_tensors(100))


def test_old_checkpoints_are_not_removed_without_the_lease(tmp_path: Path) -> None:
    for step in (100, 200):
        save_good(tmp_path, step, 1)
    with taken_over(tmp_path, after=tmp_path.name):  # the commit
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
