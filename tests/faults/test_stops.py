"""Stop signals at random instants: the step is saved and the run can continue; a second one ends it at once (F3).

``test_kill_resume`` has a stop while a save fails, ``tests/distributed/test_launchers.py`` those of every launcher.
"""

from __future__ import annotations

import random
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dtrain.cli.resolve import compose
from tests.helpers.fault_counts import FaultCounts
from tests.helpers.kills import FIRST_SAVE, SETTINGS, WORLDS, Records, train_rank
from tests.helpers.launch import Record, curve, log_of, newest_step, record_of, summary
from tests.helpers.mishap import Mishap
from tests.helpers.ranks import RankFailure, run_ranks

SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT")
LIMIT_S = 25.0  # promise P10
AT_ONCE_S = 3.0

pytestmark = [pytest.mark.processes, WORLDS]

# functions in which a run hangs after the first signal
HOLDS = (
    "dtrain.engine.adapters.native:NativeEngine._vote",
    "dtrain.optim.flat:FlatUpdate.update",
    "dtrain.checkpoint.storage:create",
    "dtrain.checkpoint.storage:sync_directory",
    "dtrain.checkpoint.storage:rename",
    "dtrain.train.run:write_summary",
)


def run(run_dir: Path, data: str, world: int, kill: Mishap | None = None) -> list[int]:
    """Starts or continues a run; returns the exit code of each rank."""
    config = compose([f"run_dir={run_dir}", *SETTINGS, data])
    return run_ranks(world, train_rank, config, kill.env() if kill else {}, f"{run_dir}.log", grace=AT_ONCE_S)


def trained(record: Record) -> Record:
    """The record without validations: a stop at a step that is due for one saves at once, without it."""
    return replace(record, curve=[line for line in record.curve if "loss" in line])


def since(mark: str) -> float:
    """Seconds since the last signal."""
    return time.time() - max(path.stat().st_mtime for path in Path(mark).parent.glob("mark-*"))


def test_the_step_is_saved(tmp_path: Path, data: str, uninterrupted: Records, faults: FaultCounts, world: int) -> None:
    """A run is stopped and continued until it is done, and then equals the one that nothing stopped."""
    count, seed = faults.count(ci=1 if world == 2 else 3, full=40), 330 + world
    rng = random.Random(seed)
    stops, runs, longest = 0, 0, 0.0
    while stops < count or runs == 0:
        run_dir, mark = tmp_path / f"run{runs}", str(tmp_path / "mark")
        rank = rng.randrange(world) if rng.random() < 0.6 else None
        place = "" if stops % 2 else FIRST_SAVE
        kill = Mishap(place, 1, rng.choice(SIGNALS), rank, mark=mark, after_s=rng.uniform(0.001, 0.3))
        codes = run(run_dir, data, world, kill if stops < count else None)
        if codes == [0] * world:  # done before the signal, or after all signals
            assert trained(record_of(run_dir)) == trained(uninterrupted[world])
            runs += 1
            continue
        longest = max(longest, since(mark))
        assert codes == [75] * world
        step = newest_step(run_dir)
        assert step == curve(run_dir)[-1]["step"] == summary(run_dir)["steps"], "saved, and verifies"
        assert f"stopped at step {step} " in log_of(run_dir)
        stops += 1
    assert longest < LIMIT_S
    faults.passed("F3", stops, seed=seed, runs=runs, longest_ms=round(1000 * longest))


def test_a_second_signal_ends_it(tmp_path: Path, data: str, faults: FaultCounts, world: int) -> None:
    """The step or the save hangs after the first signal; the newest checkpoint stays good."""
    count, seed = faults.count(ci=1, full=24), 400 + world
    rng = random.Random(seed)
    longest, commits = 0.0, 0
    for number in range(count):
        run_dir, mark = tmp_path / f"run{number}", str(tmp_path / "mark")
        hold = HOLDS[(number + world) % len(HOLDS)]
        after_s, again_s = rng.uniform(0.001, 0.3), rng.uniform(1.05, 1.4)
        place = FIRST_SAVE if number % 3 else ""
        kill = Mishap(place, 1, rng.choice(SIGNALS), mark=mark, after_s=after_s, again_s=again_s, hold=hold)
        with pytest.raises(RankFailure) as ended:
            run(run_dir, data, world, kill)
        longest = max(longest, since(mark))
        assert str(ended.value).count("the process died without a result") == world, hold
        commits += newest_step(run_dir) > 0  # each visible one verifies
        reported = re.findall(r"saved \S+step-(\d+) ", log_of(run_dir))
        assert newest_step(run_dir) >= int(reported[-1] if reported else 0)
    assert longest < AT_ONCE_S
    faults.passed("F3", count, seed=seed, with_a_commit=commits, longest_ms=round(1000 * longest))
