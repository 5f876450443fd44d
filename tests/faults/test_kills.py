"""Ranks killed repeatedly, at random instants and at named points: no commit is lost, no bit differs (F1, F2).

A run is killed and resumed until it finishes; then the next run starts. Saves are asynchronous, one every two steps.
``test_kill_resume`` has the samples that are trained on.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.fault_counts import FaultCounts
from tests.helpers.kills import CHECKPOINT, FIRST_SAVE, WORLDS, Records, Run
from tests.helpers.launch import Record
from tests.helpers.mishap import Mishap


@dataclass
class Runs:
    """Runs in one folder, one after the other, each of which must reach the record ``uninterrupted``."""

    folder: Path
    world: int
    data: str
    uninterrupted: Record
    finished: int = 0

    def start(self, kill: Mishap | None = None) -> bool:
        """Starts or continues the current run; returns whether it was killed, else it has finished."""
        run = Run(self.folder / f"run{self.finished}", self.world, self.data)
        was_killed = run.start(kill)
        if not was_killed:
            run.assert_equals(self.uninterrupted)
            self.finished += 1
        return was_killed


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)  # for the full counts
@WORLDS
def test_at_random_instants(tmp_path: Path, data: str, uninterrupted: Records, faults: FaultCounts, world: int) -> None:
    """Kills all ranks at any time after the model is built, or one of them after the first save."""
    count, seed = faults.count(ci=1 if world == 2 else 5, full=64), 100 + world
    rng = random.Random(seed)
    runs = Runs(tmp_path, world, data, uninterrupted[world])
    kills = 0
    while kills < count:
        if rng.random() < 0.4:
            kill = Mishap("", 1, after_s=rng.uniform(0.01, 0.8))
        else:  # the ranks are connected by then; before, the launcher ends the survivors
            kill = Mishap(FIRST_SAVE, 1, rank=rng.randrange(world), after_s=rng.uniform(0.001, 0.35))
        kills += runs.start(kill)
    runs.start()
    faults.passed("F1", kills, seed=seed, runs_equal=runs.finished)


# (function, call, rank); None: all ranks at once. A start opens the checkpoint, builds the engine and saves every other
# step; the first create, link and sync of rank 0 take the lease
POINTS: dict[str, tuple[str, int, int | None]] = {
    "load: opening": (f"{CHECKPOINT}.reader:load_manifest", 1, None),
    "load: reading": (f"{CHECKPOINT}.reader:CheckpointReader.read_into", 1, -1),
    "load: proving": (f"{CHECKPOINT}.reader:CheckpointReader.check_fingerprints", 1, -1),
    "lease: its file": (f"{CHECKPOINT}.storage:create", 1, 0),
    "lease: its name": (f"{CHECKPOINT}.storage:link", 1, 0),
    "lease: leftovers": (f"{CHECKPOINT}.lease.lease:_clear_leftovers", 1, 0),
    "step: forward": ("forward", 7, -1),
    "step: vote": ("vote", 4, -1),
    "step: update": ("update", 3, -1),
    "step: gather": ("dtrain.sharding.replicas:Replica.start_gather", 9, -1),
    "save: copy": (f"{CHECKPOINT}.snapshot:HostCopy.take", 2, -1),
    "step: metrics": ("metrics", 4, 0),  # half of the line is written
    "save: thread": (f"{CHECKPOINT}.async_saver:save", 1, -1),
    "save: directory": (f"{CHECKPOINT}.storage:make_directory", 2, 0),
    "save: file": (f"{CHECKPOINT}.storage:create", 1, -1),
    "save: bytes": ("write", 9, -1),
    "save: fsync": (f"{CHECKPOINT}.storage:sync", 2, -1),
    "save: manifest": (f"{CHECKPOINT}.storage:create", 3, 0),
    "save: manifest's fsync": (f"{CHECKPOINT}.storage:sync", 3, 0),
    "save: directory's fsync": (f"{CHECKPOINT}.storage:sync_directory", 1, 0),
    "save: lease check": (f"{CHECKPOINT}.lease.lease:Lease.check", 2, 0),
    "save: rename": (f"{CHECKPOINT}.storage:rename", 2, 0),
    "save: names' fsync": (f"{CHECKPOINT}.storage:sync_directory", 4, 0),
    "delete: rename": (f"{CHECKPOINT}.commit:delete_checkpoint", 1, 0),
    "delete: files": (f"{CHECKPOINT}.storage:remove_file", 4, 0),
    "save: wait": (f"{CHECKPOINT}.async_saver:AsyncSaver.wait", 6, -1),
    "end: validation": ("dtrain.train.trainer:validate", 1, -1),
    "end: summary": ("dtrain.train.run:write_summary", 1, 0),
    "end: lease": (f"{CHECKPOINT}.lease.lease:Lease.release", 1, 0),
}


@pytest.mark.timeout(1200)  # for the full counts
@WORLDS
def test_at_named_points(tmp_path: Path, data: str, uninterrupted: Records, faults: FaultCounts, world: int) -> None:
    names = [*POINTS]
    if not faults.full:  # other tests cover the remaining points
        names = names[1::10] if world == 2 else names[::3]
    runs = Runs(tmp_path, world, data, uninterrupted[world])
    runs.start(Mishap("vote", 6, rank=0))  # so that there is a checkpoint to load
    for name in names:
        place, count, rank = POINTS[name]
        kill = Mishap(place, count, rank=None if rank is None else rank % world)
        # a run that finishes before the point does not count, but a new run must reach it
        assert runs.start(kill) or runs.start(kill), f"{name} was not reached in a run"
    runs.start()
    faults.passed("F2", len(names), runs_equal=runs.finished)
