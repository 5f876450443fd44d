"""Ranks killed repeatedly, at random instants and at named points: no commit is lost, no bit differs (F1, F2).

A run is killed and resumed until it finishes; then the next run starts. Saves are asynchronous, one every two steps.
``test_kill_resume`` tests single kills closely.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from dtrain.cli.resolve import compose
from dtrain.config.schema import RunConfig
from dtrain.errors import DtrainError
from dtrain.train.run import run_training
from tests.helpers.fault_counts import FaultCounts
from tests.helpers.kills import FACTORY, Kill
from tests.helpers.launch import LAUNCHER, SMALL, Record, checkpoints, newest_step, record_of, write_samples
from tests.helpers.ranks import RankFailure, run_ranks

STEPS = 32
SETTINGS = (
    *SMALL,
    FACTORY,
    f"train.steps={STEPS}",
    "train.global_batch_size=2",
    "train.save_every=2",
    "train.eval_every=10",
    "supervise.enabled=false",
    "supervise.restarts=0",  # it is killed on purpose, often without a newer checkpoint
)


def train_rank(rank: int, world: int, config: RunConfig, env: dict[str, str], log: str) -> int:
    for name in LAUNCHER:
        os.environ.pop(name, None)
    os.environ.update(env)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), 2)
    try:
        code = run_training(config)
    except DtrainError as error:
        code = error.exit_code
    Path(f"{log}.ended-{rank}").touch()
    return code


CHECKPOINT = "dtrain.checkpoint"
FIRST_SAVE = f"{CHECKPOINT}.async_saver:save"


@dataclass
class Run:
    """A run that is started repeatedly.

    Attributes:
        run_dir: its directory.
        world: number of ranks.
        data: override that names its data.
    """

    run_dir: Path
    world: int
    data: str

    def start(self, kill: Kill | None = None) -> bool:
        """Starts the run and waits for all of its ranks; returns whether they were killed."""
        log = Path(f"{self.run_dir}.log")
        config = compose([f"run_dir={self.run_dir}", *SETTINGS, self.data])
        env = kill.env() if kill else {}
        codes, failure = [], ""
        try:
            codes = run_ranks(self.world, train_rank, config, env, str(log), grace=10.0)
        except RankFailure as error:
            failure = str(error)
        marks = [Path(f"{log}.ended-{rank}") for rank in range(self.world)]
        ended = {rank for rank, mark in enumerate(marks) if mark.exists()}
        for mark in marks:
            mark.unlink(missing_ok=True)
        if not failure:
            assert codes == [0] * self.world, log.read_text(encoding="utf-8")[-3000:]
            return False
        assert kill is not None, failure
        assert f"--- rank {kill.ranks[0]}:\nthe process died without a result" in failure
        survivors = set(range(self.world)) - set(kill.ranks)
        assert ended >= survivors, f"ranks {survivors - ended} did not end after the kill"
        self._check_visible_checkpoints(log)
        return True

    def _check_visible_checkpoints(self, log: Path) -> None:
        """Visible checkpoints verify, and the newest is no older than the last one reported."""
        reported = re.findall(r"saved \S+step-(\d+) ", log.read_text(encoding="utf-8")) if log.exists() else []
        assert newest_step(self.run_dir) >= int(reported[-1] if reported else 0)

    def assert_equals(self, uninterrupted: Record) -> None:
        """Asserts that the run finished without leftovers and equals the uninterrupted run."""
        # the last killed process leaves its lease; a start that finds the run finished takes none
        *older, before, last = (name for name in checkpoints(self.run_dir) if not name.startswith("lease-"))
        assert (before, last) == (f"step-{STEPS - 2:08d}", f"step-{STEPS:08d}")
        # each of the last saves that was killed after its commit leaves one checkpoint too many: a complete one is not
        # saved again, and only a save that finishes deletes old ones
        assert older == [f"step-{STEPS - 2 - 2 * back:08d}" for back in range(len(older), 0, -1)]
        assert len(older) <= 3
        assert record_of(self.run_dir) == uninterrupted


@dataclass
class Runs:
    """Runs in one folder, one after the other, and the record that each of them must reach."""

    folder: Path
    world: int
    data: str
    uninterrupted: Record
    finished: int = 0

    def __post_init__(self) -> None:
        self._run = self._next()

    def _next(self) -> Run:
        return Run(self.folder / f"run{self.finished}", self.world, self.data)

    def start_and_kill(self, kill: Kill) -> bool:
        """Starts the current run with a kill; returns False if it finished before the kill."""
        if self._run.start(kill):
            return True
        self._finish()
        return False

    def finish(self) -> None:
        """Lets the current run finish."""
        self._run.start()
        self._finish()

    def _finish(self) -> None:
        self._run.assert_equals(self.uninterrupted)
        self.finished += 1
        self._run = self._next()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_samples(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, data: str) -> dict[int, Record]:
    """The uninterrupted runs on one and two ranks."""
    records = {}
    for world in (1, 2):
        run = Run(tmp_path_factory.mktemp(f"whole{world}") / "run", world, data)
        assert not run.start()
        records[world] = record_of(run.run_dir)
        assert records[world].step == STEPS
    return records


@pytest.mark.timeout(1200)  # for the full counts
@pytest.mark.parametrize("world", [1, 2])
def test_at_random_instants(
    tmp_path: Path, data: str, uninterrupted: dict[int, Record], faults: FaultCounts, world: int
) -> None:
    """Kills all ranks at any time after the model is built, or one of them after the first save."""
    count, seed = faults.count(ci=3, full=64), 100 + world
    rng = random.Random(seed)
    runs = Runs(tmp_path, world, data, uninterrupted[world])
    kills = 0
    while kills < count:
        if rng.random() < 0.4:
            kill = Kill(tuple(range(world)), after_s=rng.uniform(0.01, 0.8))
        else:  # the ranks are connected by then; before, the launcher ends the survivors
            kill = Kill((rng.randrange(world),), FIRST_SAVE, after_s=rng.uniform(0.001, 0.35))
        kills += runs.start_and_kill(kill)
    runs.finish()
    faults.passed("F1", kills, seed=seed, runs_equal=runs.finished)


# (function, call, rank); None: all ranks at once. A start opens the checkpoint, builds the engine and saves every other
# step; the first create, link and sync of rank 0 take the lease
POINTS: dict[str, tuple[str, int, int | None]] = {
    "load: opening": (f"{CHECKPOINT}.reader:load_manifest", 1, None),
    "load: reading": (f"{CHECKPOINT}.reader:CheckpointReader.read_into", 1, -1),
    "load: proving": (f"{CHECKPOINT}.reader:CheckpointReader.check_fingerprints", 1, -1),
    "lease: its file": (f"{CHECKPOINT}.storage:create", 1, 0),
    "lease: its content": (f"{CHECKPOINT}.storage:write", 1, 0),
    "lease: its name": (f"{CHECKPOINT}.storage:link", 1, 0),
    "lease: leftovers": (f"{CHECKPOINT}.lease.lease:_clear_leftovers", 1, 0),
    "step: forward": ("dtrain.models.transformer:Attention.forward", 7, -1),
    "step: reduction": ("dtrain.distributed.ring_exchange:RingExchange.send", 20, -1),
    "step: all vote": ("dtrain.engine.native:NativeEngine._vote", 3, None),
    "step: vote": ("dtrain.engine.native:NativeEngine._vote", 4, -1),
    "step: update": ("dtrain.optim.flat:FlatUpdate.update", 3, -1),
    "step: gather": ("dtrain.sharding.replicas:Replica.start_gather", 9, -1),
    "step: metrics": ("dtrain.telemetry.metrics:MetricsFile._append", 4, 0),
    "save: copy": (f"{CHECKPOINT}.snapshot:HostCopy.take", 2, -1),
    "save: thread": (f"{CHECKPOINT}.async_saver:save", 1, -1),
    "save: begin": (f"{CHECKPOINT}.commit:_begin", 2, 0),
    "save: directory": (f"{CHECKPOINT}.storage:make_directory", 2, 0),
    "save: file": (f"{CHECKPOINT}.storage:create", 1, -1),
    "save: all files": (f"{CHECKPOINT}.storage:create", 2, None),
    "save: bytes": (f"{CHECKPOINT}.storage:write", 9, -1),
    "save: all bytes": (f"{CHECKPOINT}.storage:write", 12, None),
    "save: fsync": (f"{CHECKPOINT}.storage:sync", 2, -1),
    "save: close": (f"{CHECKPOINT}.storage:close", 2, -1),
    "save: reports": (f"{CHECKPOINT}.commit:_assemble", 2, 0),
    "save: manifest": (f"{CHECKPOINT}.storage:create", 3, 0),
    "save: manifest's fsync": (f"{CHECKPOINT}.storage:sync", 3, 0),
    "save: directory's fsync": (f"{CHECKPOINT}.storage:sync_directory", 1, 0),
    "save: lease check": (f"{CHECKPOINT}.lease.lease:Lease.check", 2, 0),
    "save: commit": (f"{CHECKPOINT}.commit:_commit", 2, 0),
    "save: rename": (f"{CHECKPOINT}.storage:rename", 2, 0),
    "save: names' fsync": (f"{CHECKPOINT}.storage:sync_directory", 4, 0),
    "delete: choice": (f"{CHECKPOINT}.commit:find_expired", 2, 0),
    "delete: rename": (f"{CHECKPOINT}.commit:delete_checkpoint", 1, 0),
    "delete: files": (f"{CHECKPOINT}.storage:remove_file", 4, 0),
    "delete: directory": (f"{CHECKPOINT}.storage:remove_directory", 2, 0),
    "save: wait": (f"{CHECKPOINT}.async_saver:AsyncSaver.wait", 6, -1),
    "end: validation": ("dtrain.train.trainer:validate", 1, -1),
    "end: summary": ("dtrain.train.run:write_summary", 1, 0),
    "end: lease": (f"{CHECKPOINT}.lease.lease:Lease.release", 1, 0),
}


def at_points(runs: Runs, names: Sequence[str], world: int) -> None:
    """Kills once at each point. A run that finishes before the point does not count, but a new run must reach it."""
    for name in names:
        place, count, rank = POINTS[name]
        ranks = tuple(range(world)) if rank is None else (rank % world,)
        if not runs.start_and_kill(Kill(ranks, place, count)):
            assert runs.start_and_kill(Kill(ranks, place, count)), f"{name} was not reached in a run"


@pytest.mark.timeout(1200)  # for the full counts
@pytest.mark.parametrize("world", [1, 2])
def test_at_named_points(
    tmp_path: Path, data: str, uninterrupted: dict[int, Record], faults: FaultCounts, world: int
) -> None:
    names = [name for name in POINTS if name != "step: reduction" or world > 1]
    if not faults.full:  # the two worlds alternate; other tests cover the remaining points
        names = names[world - 1 :: 6]
    runs = Runs(tmp_path, world, data, uninterrupted[world])
    runs.start_and_kill(
        Kill((0,), "dtrain.engine.native:NativeEngine._vote", 6)
    )  # so that there is a checkpoint to load
    at_points(runs, names, world)
    runs.finish()
    faults.passed("F2", len(names), runs_equal=runs.finished)
