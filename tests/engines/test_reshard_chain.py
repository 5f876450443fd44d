"""One state through a chain of world sizes and engines, each loading what the one before it saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.helpers import fingerprints, start, train_step
from tests.helpers.fault_counts import FaultCounts
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

# seven layouts and four numbers of ranks, so that no link of the full chain is like another
LAYOUTS = [("deepspeed", 2), ("fsdp2", 3), ("ddp", 0), ("native", 3), ("deepspeed", 3), ("fsdp2", 2), ("native", 1)]
WORLDS = [2, 4, 1, 3]


def train_and_save(rank: int, world: int, target: Path) -> None:
    engine = start("native", 2)
    for _ in range(2):
        assert train_step(engine, 1).applied
    engine.save(target)


def load_and_save(rank: int, world: int, name: str, stage: int, source: Path, target: Path) -> None:
    engine = start(name, stage, seed=7)
    engine.load(source)
    engine.save(target)


def test_fingerprints_stay_from_link_to_link(tmp_path: Path, faults: FaultCounts) -> None:
    count = faults.count(ci=4, full=20)
    run_ranks(1, train_and_save, tmp_path / "0")
    expected = fingerprints(tmp_path / "0")
    assert len({fingerprint for fingerprint, _, _ in expected.values()}) > 10
    links = [(*LAYOUTS[number % len(LAYOUTS)], WORLDS[number % len(WORLDS)]) for number in range(count)]
    assert len(set(links)) == count
    for number, (name, stage, world) in enumerate(links):
        source, target = tmp_path / f"{number}", tmp_path / f"{number + 1}"
        run_ranks(world, load_and_save, name, stage, source, target)
        assert fingerprints(target) == expected, (name, stage, world)
    faults.passed("F11", count)
