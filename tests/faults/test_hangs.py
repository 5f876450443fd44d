"""Ranks that hang, crash again and again, or are killed with their launcher: all end, named, and nothing stays behind.

F4: a hang. F14: restarts without progress. P9: kills of ranks and launchers.
``tests.unit.supervision`` has the watcher itself, and hangs in each phase.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from dtrain.cli.resolve import compose
from dtrain.config.schema import SuperviseConfig
from tests.helpers.fault_counts import FaultCounts
from tests.helpers.kills import WORLDS, train_rank
from tests.helpers.launch import SMALL, checkpoints, newest_step, python, started, torchrun
from tests.helpers.mishap import Mishap
from tests.helpers.ranks import RankFailure, run_ranks

LIMIT_S = 4.0
TOLERANCE_S = 2.0
ENDLESS = ("train.steps=100000", "train.save_every=4", "train.eval_every=6")


def test_a_hang_of_forked_ranks_is_named_and_ended(tmp_path: Path, data: str, faults: FaultCounts) -> None:
    mishap = Mishap("forward", 20, "SIGSTOP", rank=1, mark=str(tmp_path / "mark"))
    config = compose([*SMALL, data, *ENDLESS, f"supervise.limit_s={LIMIT_S}", f"run_dir={tmp_path}/run"])
    log = tmp_path / "log"
    with pytest.raises(RankFailure) as ended:
        run_ranks(2, train_rank, config, mishap.env(), str(log), grace=10.0)
    taken = time.time() - (tmp_path / "mark-1").stat().st_mtime
    assert str(ended.value).count("the process died without a result") == 2
    assert "dtrain: rank 1 is stopped (SIGSTOP) in 'forward' of step 7 since" in log.read_text()
    report = sorted(path.name for path in (tmp_path / "run/failures/hang-1").iterdir())
    assert report == ["hang.json", "rank-0.txt", "rank-1.txt"]
    assert LIMIT_S <= taken <= LIMIT_S + TOLERANCE_S
    faults.passed("F4", 1, named=1, slowest_ms=round(1000 * taken))


@WORLDS
def test_a_run_that_crashes_in_its_first_step_is_started_four_times(
    tmp_path: Path, data: str, faults: FaultCounts, world: int
) -> None:
    log, crashes = tmp_path / "log", ("SIGKILL", "raise", "SIGABRT", "SIGSEGV", "SIGKILL")
    config = compose([*SMALL, data, f"run_dir={tmp_path}/run", "supervise.enabled=false"])
    trained = 0
    for number, crash in enumerate(crashes):
        mishap = Mishap("forward", 1, crash, rank=world - 1, mark=str(tmp_path / f"attempt-{number}"))
        with suppress(RankFailure):
            assert run_ranks(world, train_rank, config, mishap.env(), str(log)) == [1] * world
        trained += bool([*tmp_path.glob(f"attempt-{number}-*")])
        assert trained == min(number + 1, 4)
    refused = [line for line in log.read_text().splitlines() if "is not started again: 4 attempts in a row" in line]
    assert len(refused) == world
    assert checkpoints(tmp_path / "run") == []
    # the last word is the user's
    again = replace(config, supervise=SuperviseConfig(enabled=False, restarts=0))
    assert run_ranks(world, train_rank, again, {}, str(log)) == [0] * world
    faults.passed("F14", len(crashes), trained=trained, refused=len(crashes) - trained)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)  # for the full counts
def test_killed_ranks_and_launchers_leave_no_orphan(tmp_path: Path, data: str, faults: FaultCounts) -> None:
    """SIGKILL at any time: of a rank, of the launcher, or of both and the watcher. Each start takes over at once."""
    count, seed = faults.count(ci=3, full=100), 17
    rng, run_dir, temporary = random.Random(seed), tmp_path / "run", tmp_path / "tmp"
    temporary.mkdir()
    argv = (*SMALL, data, *ENDLESS, f"run_dir={run_dir}", "supervise.restarts=0")
    shared = set(os.listdir("/dev/shm"))
    orphans = leftovers = late_starts = 0
    for number in range(count):
        start = (started, torchrun, started, python)[number % 4]
        victims = rng.choice(["rank", "launcher", "launcher", "all"])
        with start(tmp_path / f"job-{number}", *argv, env={"TMPDIR": str(temporary)}) as job:
            if number % 3 == 0:  # else at any time, the start included
                began, before = time.monotonic(), newest_step(run_dir)
                job.wait_until(lambda: newest_step(run_dir) > before)  # noqa: B023
                # a dead process's lease is taken at once, not after 90 s
                late_starts += number > 0 and time.monotonic() - began > 80
            time.sleep(rng.uniform(0, 1 if number % 3 == 0 else 6))
            pids = {**job.ranks(), -1: job.pid} if victims == "all" else job.ranks()
            chosen = [*pids.values()] if victims == "all" else [rng.choice([*pids.values()])] if pids else [job.pid]
            for pid in [job.pid] if victims == "launcher" else chosen:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            orphans += not job.gone(30)
            assert not orphans, f"kill {number} of {victims}: {job.processes()}\n{job.output}"
        names = [name for name in os.listdir(temporary) if not name.startswith(("torchelastic_", "torchinductor_"))]
        leftovers += len(names) + len([name for name in set(os.listdir("/dev/shm")) - shared if "dtrain" in name])
        assert not leftovers, f"kill {number} of {victims} left {names}"
    assert not late_starts
    faults.passed("P9", count, seed=seed, orphans=orphans, leftovers=leftovers, late_starts=late_starts)
