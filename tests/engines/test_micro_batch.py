"""Under every engine, micro-batches told by ``engine.micro_batch`` train as those of ``engine.accumulate``, in bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import dtrain
from dtrain.config.capabilities import CAPABILITIES
from dtrain.engine.step import StepEngine
from tests.engines.helpers import STAGES, batch, start, state_digests
from tests.helpers.ranks import run_ranks

ACCUMULATION = 3


def iterated(engine: StepEngine) -> Iterator[int]:
    return engine.accumulate(range(ACCUMULATION))


def told(engine: StepEngine) -> Iterator[int]:
    for number in range(ACCUMULATION):
        with engine.micro_batch(last=number == ACCUMULATION - 1):
            yield number


def told_without_a_last(engine: StepEngine) -> Iterator[int]:
    for number in range(ACCUMULATION):
        with engine.micro_batch(last=False):
            yield number


def told_in_another_order(engine: StepEngine) -> Iterator[int]:
    """The control: the same samples, with the random numbers of other micro-batches."""
    for number in reversed(range(ACCUMULATION)):
        with engine.micro_batch(last=number == 0):
            yield number


Loop = Callable[[StepEngine], Iterator[int]]


def train(engine: StepEngine, loop: Loop) -> tuple[list[dtrain.StepOutcome], dict[str, str]]:
    outcomes = []
    for step in range(2):
        for number in loop(engine):
            index = (step * ACCUMULATION + number) * engine.world_size + engine.rank
            engine.backward(engine(tokens=batch(index)), weight=1 + index % 3)
        outcomes.append(engine.step())
        assert outcomes[-1].applied
    return outcomes, state_digests(engine)


def compare(rank: int, world: int, folder: Path, cases: list[tuple[str, int, dict[str, Any]]]) -> None:
    for number, (name, stage, options) in enumerate(cases):
        where = f"engine={name} zero_stage={stage} {options} world={world}"
        engine = start(name, stage, dropout=0.3, precision="bf16", **options)
        engine.save(folder / str(number))
        expected = train(engine, iterated)
        loops: dict[Loop, bool] = {told: True, told_without_a_last: True, told_in_another_order: False}
        for loop, is_equal in loops.items():
            engine.load(folder / str(number))
            assert (train(engine, loop) == expected) is is_equal, f"{where}: {loop.__name__}"


@pytest.mark.processes
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", CAPABILITIES)
def test_told_and_iterated_micro_batches_train_alike(name: str, world: int, tmp_path: Path) -> None:
    cases: list[tuple[str, int, dict[str, Any]]] = [(engine, stage, {}) for engine, stage in STAGES if engine == name]
    if name == "native":
        cases += [(name, 2, {"reproducible": True})]
    run_ranks(world, compare, tmp_path, cases)
