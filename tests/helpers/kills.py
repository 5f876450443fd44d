"""Runs whose ranks are killed or stopped, and started again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from dtrain.cli.resolve import compose
from dtrain.config.schema import RunConfig
from tests.helpers.launch import SMALL, Record, checkpoints, newest_step, record_of, train_here
from tests.helpers.mishap import Mishap
from tests.helpers.ranks import RankFailure, run_ranks

CHECKPOINT = "dtrain.checkpoint"
FIRST_SAVE = f"{CHECKPOINT}.async_saver:save"
WORLDS = pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.exhaustive)])
STEPS = 32
SETTINGS = (
    *(*SMALL, f"train.steps={STEPS}", "train.global_batch_size=2", "train.save_every=2", "train.eval_every=10"),
    *("supervise.enabled=false", "supervise.restarts=0"),  # it is killed on purpose, often without a newer checkpoint
)


def train_rank(rank: int, world: int, config: RunConfig, env: dict[str, str], log: str) -> int:
    code = train_here(config, env, log)
    Path(f"{log}.ended-{rank}").touch()
    return code


@dataclass
class Run:
    """A run that is started repeatedly; ``data`` is the word that names its data."""

    run_dir: Path
    world: int
    data: str

    def start(self, kill: Mishap | None = None) -> bool:
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
        killed = {*range(self.world)} if kill.rank is None else {kill.rank}
        assert f"--- rank {min(killed)}:\nthe process died without a result" in failure
        survivors = {*range(self.world)} - killed
        assert ended >= survivors, f"ranks {survivors - ended} did not end after the kill"
        reported = re.findall(r"saved \S+step-(\d+) ", log.read_text(encoding="utf-8")) if log.exists() else []
        assert newest_step(self.run_dir) >= int(reported[-1] if reported else 0), "visible ones verify"
        return True

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


class Records(dict[int, Record]):
    """Record of the uninterrupted run by world size; computed when first used."""

    def __init__(self, folder: Path, data: str) -> None:
        super().__init__()
        self._folder, self._data = folder, data

    def __missing__(self, world: int) -> Record:
        run = Run(self._folder / str(world), world, self._data)
        assert not run.start()
        record = self.setdefault(world, record_of(run.run_dir))
        assert record.step == STEPS
        return record
