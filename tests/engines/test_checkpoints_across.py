"""Save under any engine on any number of ranks, load under any other: equal bits, and the same loss curve afterwards.

``pytest -m exhaustive tests/engines`` takes every engine on 1, 2 and 3 ranks with every engine on 1, 2, 3 and 4. Without
it, each pair of engines comes once, and each number of ranks as source and as target.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import dtrain
from dtrain.checkpoint import open_newest
from dtrain.errors import CheckpointError
from tests.engines.helpers import batch, start, state_digests, train_step
from tests.helpers.checkpoints import ALONE
from tests.helpers.damage import sealed
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

ENGINES = ("native", "fsdp2", "deepspeed", "ddp")
MICRO_BATCHES = 6  # of a step before the save, on 1, 2 or 3 ranks
NUM_LOSSES = 20
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}  # relative; promise P5
EXTRA = {"note": [1, "two"]}


@dataclass(frozen=True)
class Setup:
    """An engine on some ranks, and the steps that it has trained."""

    engine: str
    stage: int
    world: int
    precision: str = "bf16"
    steps: int = 0

    @property
    def label(self) -> str:
        return f"{self.engine}{self.stage}-{self.precision}-on-{self.world}-at-{self.steps}"

    def start(self, seed: int) -> Any:
        """A new engine; the loss scale doubles every second step, so that its state matters."""
        scale = dtrain.LossScale("dynamic", init=256.0, growth_interval=2)
        return start(self.engine, self.stage, dropout=0.1, seed=seed, precision=self.precision, loss_scale=scale)


@dataclass(frozen=True)
class Load:
    """What is loaded by what, and the micro-batches of each of the steps that follow."""

    source: Setup
    target: Setup
    micro_batches: int

    @staticmethod
    def of(source: Setup, target: Setup) -> Load:
        return Load(source, target, 3 if target.world == 3 else 4)  # as few as the ranks share equally

    @property
    def reference(self) -> Load:
        """The native engine on one rank, whose losses are the reference."""
        return replace(self, target=Setup("native", 0, 1, self.target.precision))


@dataclass(frozen=True)
class State:
    """All that must come through a checkpoint."""

    tensors: dict[str, str]
    counters: tuple[int, int, int]
    loss_scale: dict[str, Any]
    seed: int
    run_id: str


def state_of(engine: Any) -> State:
    counters = (engine.attempted_steps, engine.applied_steps, engine.data_cursor)
    return State(state_digests(engine), counters, engine.loss_scale.to_dict(), engine.seed, engine.run_id)


def fingerprints(folder: Path) -> dict[str, tuple[int, Any, Any]]:
    """Of all tensors of the newest checkpoint there but the frozen ones, whose dtype an engine decides."""
    reader = open_newest(folder, ALONE)
    return {t.label: (t.fingerprint, t.dtype, t.shape) for t in reader.tensors if t.kind != "frozen"}


def save_all(rank: int, world: int, folder: Path, setups: list[Setup]) -> list[State]:
    """Trains each of ``setups``, skips the second of its steps, and saves it under its label."""
    states = []
    for number, setup in enumerate(setups):
        engine = setup.start(seed=20 + number)
        for step in range(setup.steps):
            if step == 1:
                for _ in engine.accumulate(range(MICRO_BATCHES // world)):
                    engine.backward(engine(tokens=batch(0)), weight=0.0)
                assert engine.step().reason == "empty"
            else:
                assert train_step(engine, MICRO_BATCHES).applied, setup
        engine.save(folder / setup.label, extra=EXTRA)
        states.append(state_of(engine))
    return states


def refuses_an_impossible_state(engine: Any, saved: Path) -> None:
    """The engine refuses a copy of ``saved`` whose counters contradict each other, on all ranks, and stays as it is."""
    copy = saved.with_name(f"{saved.name}-impossible")
    name = f"step-{engine.attempted_steps:08d}"
    if engine.rank == 0:
        shutil.copytree(saved, copy)
        sealed(lambda m: m["state"]["engine_state"].update(applied_steps=99))(copy / name)
    engine.comm.barrier()
    before = state_of(engine)
    for path in (copy / name, copy):
        with pytest.raises(
            CheckpointError, match="applied_steps=99; expected a whole number from 0 to attempted_steps"
        ):
            engine.load(path)
    assert state_of(engine) == before
    assert (copy / f"bad-{name}-state").is_dir()


def load_all(rank: int, world: int, folder: Path, loads: list[Load]) -> list[tuple[State, dict[str, Any], list[float]]]:
    """For each load what has come, what a second save of it holds, and the next losses; one engine for each target.

    Each engine then refuses an impossible state.
    """
    engines: dict[Setup, Any] = {}
    tried: set[str] = set()
    results = []
    for load in loads:
        engine = engines.get(load.target) or engines.setdefault(load.target, load.target.start(seed=1))
        assert engine.load(folder / load.source.label) == EXTRA
        again = folder / f"again-on-{world}" / f"{load.source.label}-{load.target.label}-{load.micro_batches}"
        engine.save(again)
        state = state_of(engine)
        if load.target.engine not in tried:
            tried.add(load.target.engine)
            refuses_an_impossible_state(engine, again)
        losses = []
        for _ in range(NUM_LOSSES):
            outcome = train_step(engine, load.micro_batches)
            assert outcome.applied, load
            losses.append(outcome.loss)
        results.append((state, fingerprints(again) if rank == 0 else {}, losses))
    return results


def save_sources(folder: Path, sources: Iterable[Setup]) -> dict[Setup, State]:
    states: dict[Setup, State] = {}
    for world in range(1, 5):
        setups = [source for source in sources if source.world == world]
        if setups:
            states |= dict(zip(setups, run_ranks(world, save_all, folder, setups)[0], strict=True))
    return states


def check_loads(folder: Path, states: dict[Setup, State], loads: list[Load]) -> None:
    """Loads what :func:`save_sources` has saved, and compares."""
    results = {}
    for world in range(1, 5):
        chosen = dict.fromkeys([*(load.reference for load in loads), *loads])
        here = [load for load in chosen if load.target.world == world]
        ranks = run_ranks(world, load_all, folder, here, timeout=1200.0) if here else [[]]
        assert all(rank[n][2] == ranks[0][n][2] for rank in ranks for n in range(len(here))), "the ranks disagree"
        results |= dict(zip(here, ranks[0], strict=True))
    for load in loads:
        source, where = load.source, f"{load.source.label} loaded by {load.target.label}"
        got, again, losses = results[load]
        differing = {name for name in states[source].tensors if states[source].tensors[name] != got.tensors.get(name)}
        assert not differing, f"{where}: {sorted(differing)}"
        assert got == states[source], where
        assert again == fingerprints(folder / source.label), f"{where}, and saved again"
        assert losses == pytest.approx(results[load.reference][2], rel=TOLERANCE[load.target.precision]), where


@cache
def stage_of(engine: str, number: int) -> int:
    """Alternates over the stages that an engine supports."""
    stages = {"native": (1, 3, 0, 2), "fsdp2": (3, 2), "deepspeed": (3, 1, 2, 0), "ddp": (0,)}[engine]
    return stages[number % len(stages)]


TRAINED = 4
SOURCES = {
    "native": (Setup("native", 3, 3, "bf16", TRAINED), Setup("native", 1, 2, "fp32", TRAINED)),
    "fsdp2": (Setup("fsdp2", 2, 3, "bf16", TRAINED), Setup("fsdp2", 3, 2, "fp32", TRAINED)),
    "deepspeed": (Setup("deepspeed", 3, 2, "bf16", TRAINED), Setup("deepspeed", 1, 2, "fp32", TRAINED)),
    "ddp": (Setup("ddp", 0, 2, "bf16", TRAINED), Setup("ddp", 0, 1, "fp32", TRAINED)),
}


# on how many ranks an engine loads the source of each of ENGINES; few on 3 and 4, where every start costs as often
WORLDS = {"native": (2, 3, 4, 4), "fsdp2": (4, 2, 2, 4), "deepspeed": (1, 2, 3, 2), "ddp": (3, 4, 1, 2)}


def covering_loads() -> list[Load]:
    """Each engine as source with each as target, each number of ranks as target; and some from before any step."""
    loads = []
    for number, name in enumerate(ENGINES):
        for other, (of, world) in enumerate(zip(ENGINES, WORLDS[name], strict=True)):
            source = SOURCES[of][(number + other) % 2]
            loads.append(Load.of(source, Setup(name, stage_of(name, other), world, source.precision)))
        fresh = replace(SOURCES[ENGINES[number - 1]][0], world=2, steps=0)
        loads.append(Load.of(fresh, Setup(name, stage_of(name, 2), 2)))
    return loads


def test_any_engine_loads_what_any_other_saved(tmp_path: Path) -> None:
    loads = covering_loads()
    sources = list(dict.fromkeys(load.source for load in loads))
    assert len({(load.source.engine, load.target.engine) for load in loads if load.source.steps}) == len(ENGINES) ** 2
    assert {load.source.world for load in loads} == {1, 2, 3}
    assert {load.target.world for load in loads} == {1, 2, 3, 4}
    states = save_sources(tmp_path, sources)
    for source, state in states.items():
        applied = max(source.steps - 1, 0)
        assert state.counters == (source.steps, applied, applied * MICRO_BATCHES)
        assert state.loss_scale["scale"] == 256.0 * 2 ** (applied // 2), "it has grown"
    check_loads(tmp_path, states, loads)


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("precision", TOLERANCE)
def test_the_whole_matrix(tmp_path: Path, precision: str) -> None:
    """Every engine on 1, 2 and 3 ranks with every engine on 1, 2, 3 and 4, alternating over the stages."""
    sources = [
        Setup(name, stage_of(name, world + number), world, precision, TRAINED)
        for number, name in enumerate(ENGINES)
        for world in (1, 2, 3)
    ]
    loads = [
        Load.of(source, Setup(name, stage_of(name, number + world), world, precision))
        for number, source in enumerate(sources)
        for name in ENGINES
        for world in (1, 2, 3, 4)
    ]
    check_loads(tmp_path, save_sources(tmp_path, sources), loads)
