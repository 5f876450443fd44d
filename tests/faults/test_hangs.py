"""Ranks that hang, crash again and again, or are killed with their launcher: all end, named, and nothing stays behind.

F4: hangs in each phase under each launcher. F14: restarts without progress. P9: kills of ranks and launchers.
``tests.unit.supervision`` has the watcher itself.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dtrain.cli.resolve import compose
from dtrain.config.schema import SuperviseConfig
from tests.helpers.fault_counts import FaultCounts
from tests.helpers.kills import WORLDS, train_rank
from tests.helpers.launch import (
    SMALL,
    Job,
    checkpoints,
    deepspeed_sh,
    newest_step,
    python,
    sbatch,
    started,
    torchrun,
)
from tests.helpers.mishap import Mishap
from tests.helpers.ranks import RankFailure, run_ranks

LIMIT_S = 4.0
TOLERANCE_S = 2.0
ENDLESS = ("train.steps=100000", "train.save_every=4", "train.eval_every=6")


@dataclass(frozen=True)
class HangCase:
    """A hang of a real run."""

    start: Callable[..., Job]  # its launcher
    mishap: Mishap
    message: str  # how the line on the console begins
    overrides: tuple[str, ...] = (f"supervise.limit_s={LIMIT_S}",)
    code: int = 1  # exit code of the command


_SYNCHRONOUS = ("checkpoint.asynchronous=false", f"supervise.save_s={LIMIT_S}")
HANGS = {
    "stopped in a step": HangCase(
        started, Mishap("forward", 20, "SIGSTOP", rank=1), "rank 1 is stopped (SIGSTOP) in 'forward' of step 7 since"
    ),
    "evaluation": HangCase(
        python, Mishap("forward", 37, "block"), "rank 0 is in 'evaluation' after step 6 since", code=-signal.SIGKILL
    ),
    "endless loader": HangCase(torchrun, Mishap("data", 9, "loop", rank=0), "rank 0 is in 'data' of step 9 since"),
    "blocked in C": HangCase(
        sbatch, Mishap("forward", 20, "block", rank=1), "rank 1 is in 'forward' of step 7 since", code=137
    ),
    "blocked storage": HangCase(
        started, Mishap("create", 2, "block", rank=0), "rank 0 is in 'save' after step 4 since", _SYNCHRONOUS
    ),
    "start": HangCase(
        started, Mishap("model", 1, "block", rank=1), "rank 1 is in 'start' since", (f"supervise.start_s={LIMIT_S}",)
    ),
    "both stopped": HangCase(
        deepspeed_sh,
        Mishap("forward", 20, "SIGSTOP"),
        "ranks 0-1 are stopped (SIGSTOP) in 'forward' of step 7",
        code=247,
    ),
    "collective of a library": HangCase(
        torchrun,
        Mishap("forward", 20, "block", rank=1),
        "rank 1 is in 'forward' of step 7 since",
        ("engine=ddp", f"supervise.limit_s={LIMIT_S}"),
    ),
}
# the unit tests have the other phases, without training
DEFAULT, REST = ["stopped in a step"], [name for name in HANGS if name != "stopped in a step"]


@pytest.mark.timeout(1200)  # for the full counts
@pytest.mark.parametrize("names", [DEFAULT, pytest.param(REST, marks=pytest.mark.exhaustive)], ids=len)
def test_a_hang_is_named_and_ended(tmp_path: Path, data: str, faults: FaultCounts, names: list[str]) -> None:
    chosen = names if faults.full else [name for name in names if name in (*DEFAULT, "endless loader")]
    with ThreadPoolExecutor(2) as pool:  # two at a time: most of it is waiting
        taken = list(pool.map(lambda name: _hang(name, tmp_path / name.replace(" ", "-"), data), chosen))
    assert all(LIMIT_S <= seconds <= LIMIT_S + TOLERANCE_S for seconds in taken), dict(zip(chosen, taken, strict=True))
    faults.passed("F4", len(taken), named=len(taken), slowest_ms=round(1000 * max(taken)))


def _hang(name: str, folder: Path, data: str) -> float:
    """Lets a run hang, and checks what it leaves; returns the seconds from the fault to the end of all ranks."""
    case = HANGS[name]
    mishap = replace(case.mishap, mark=str(folder / "mark"))
    argv = (*SMALL, data, *ENDLESS, *case.overrides, f"run_dir={folder}/run")
    with case.start(folder, *argv, env=mishap.env()) as job:
        job.wait_until(lambda: any(folder.glob("mark-*")))
        ranks = job.ranks() or {0: job.pid}
        assert len(ranks) == (1 if case.start is python else 2)
        while any(map(_is_alive, ranks.values())):
            time.sleep(0.01)
        taken = time.time() - max(path.stat().st_mtime for path in folder.glob("mark-*"))
        assert job.wait() == case.code, job.output
        assert job.gone(TOLERANCE_S), [env for _, env in job.processes()]
        output = job.output
    assert f"dtrain: {case.message}" in output, output
    if name != "start":  # there is no run directory yet
        failures = folder / "run/failures/hang-1"
        assert json.loads((failures / "hang.json").read_text())["message"].startswith(case.message)
        assert {path.name for path in failures.iterdir()} == {"hang.json", *(f"rank-{rank}.txt" for rank in ranks)}
    return taken


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# -- restarts ----------------------------------------------------------------------------------------------------------


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
@pytest.mark.timeout(1200)
def test_torchrun_restarts_no_more_than_three_times(tmp_path: Path, data: str, faults: FaultCounts) -> None:
    env = Mishap("forward", 1, "raise", rank=1, mark=str(tmp_path / "mark")).env()
    with torchrun(tmp_path, *SMALL, data, f"run_dir={tmp_path}/run", options=["--max-restarts=5"], env=env) as job:
        assert job.wait() == 1
        assert job.gone()
    assert job.output.count("RuntimeError: the model broke") == 4
    assert job.output.count("is not started again: 4 attempts in a row") >= 2
    faults.passed("F14", 6, trained=4)


# -- kills -------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(3600)  # for the full counts
@pytest.mark.parametrize("share", ["first", pytest.param("rest", marks=pytest.mark.exhaustive)])
def test_killed_ranks_and_launchers_leave_no_orphan(tmp_path: Path, data: str, faults: FaultCounts, share: str) -> None:
    """SIGKILL at any time: of a rank, of the launcher, or of both and the watcher. Each start takes over at once."""
    count, seed = 1 if share == "first" else faults.count(ci=2, full=99), 17
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
                late_starts += time.monotonic() - began > 80  # a dead process's lease is taken at once, not after 90 s
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
