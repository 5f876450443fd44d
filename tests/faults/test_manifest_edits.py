"""Manifests edited at random, with a new hash, so that only the checks of their content can find it (F5).

Each edit is refused by a ``DtrainError`` before anything of the engine changes, or loads the very values that were
saved. Edits within what a load restores but cannot judge (the user's ``extra``, another valid counter) are not tried.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dtrain
from dtrain.checkpoint import Snapshot, open_newest, save, verify
from dtrain.checkpoint.format.manifest import canonical_json
from dtrain.errors import DtrainError
from tests.helpers.checkpoints import ALONE, on_threads, shards_of
from tests.helpers.damage import sealed
from tests.helpers.fault_counts import FEW_AND_MANY, FaultCounts
from tests.helpers.one_rank import build, start, train_step

OLDER, NEWEST = "step-00000001", "step-00000002"
LIMIT_S = 1.0
Edit = Callable[[dict[str, Any]], Any]
State = dict[str, Any]


def model() -> nn.Module:
    built = build()
    built.register_buffer("counts", torch.arange(3))
    built.frozen = nn.Parameter(torch.full((5,), 0.1), requires_grad=False)
    return built


OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {
        "ema_decay": 0.9,
        "loss_scale": dtrain.LossScale("calibrated", calibration_steps=1),
    },
    "nadam": {"optimizer": dtrain.TorchOptimizer("torch.optim:NAdam", lr=1e-3), "loss_scale": "dynamic"},
}


def state_of(engine: Any) -> State:
    """Everything that a load restores, and the compute weights."""
    shards = {(kind, s.name): s.data for kind in engine.saved_dtypes for s in engine.local_shards(kind)}
    live = {("live", name): tensor for name, tensor in engine.module.state_dict().items()}
    return {
        "tensors": {key: (str(t.dtype), t.detach().numpy().tobytes()) for key, t in (shards | live).items()},
        "counters": (engine.attempted_steps, engine.applied_steps, engine.data_cursor, engine.seed, engine.run_id),
        "scale": engine.loss_scale.to_dict(),
        "rules": [rule.state_dict() for rule in engine.plan.rules],
        "usable": not engine._checkpointer.load_failed,
    }


@dataclass
class Template:
    """Two good checkpoints, in two files each, an engine in a third state, and what it is after a load of each."""

    folder: Path
    engine: Any
    resting: Path
    states: dict[str, State]
    extra: dict[str, Any]

    def rest(self) -> State:
        self.engine.load(self.resting)
        return state_of(self.engine)


def two_files(saved: Path, target: Path) -> None:
    """Saves a checkpoint of one rank as two ranks would."""
    reader = open_newest(saved, ALONE)
    tensors = {(t.kind, t.name): reader.read(t.kind, t.name).view(t.shape) for t in reader.tensors}
    state = {**reader.state, "world_size": 2}
    work = [Snapshot(reader.step, shards_of(tensors, rank, 2), state) for rank in range(2)]
    assert not [e for e in on_threads(2, lambda comm: save(target, work[comm.rank], comm)) if isinstance(e, Exception)]


@pytest.fixture(scope="module", params=OPTIONS)
def template(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Template:
    folder = tmp_path_factory.mktemp(request.param)
    engine = start(model(), seed=7, **OPTIONS[request.param])
    extra = {"tokens": 48, "note": ["kept"]}
    states = {}
    for step in (1, 2, 3):
        train_step(engine)
        engine.data_cursor = 16 * step
        path = engine.save(folder / "whole", extra=extra, config={"a": 1}, metrics={"val_loss": 2.5})
        states[path.name] = state_of(engine)
        if step < 3:
            two_files(path, folder / "checkpoints")
    found = Template(folder, engine, path, states, extra)
    assert len({canonical_json(repr(state)) for state in states.values()}) == 3, "the states can be told apart"
    return found


# -- edits -------------------------------------------------------------------------------------------------------------

LEFT_ALONE = {("state", "extra"), ("state", "run_id")}  # any other text, and the user's own values, are as good
JUNK: list[Any] = [
    None, True, False, -1, -0.5, 2**63, 2**64, 10**30, -(10**300), 1 << 4000, "", "x", "NaN", "1", "../../etc/passwd",
    "\ud800\x1b[2J", [], {}, [1], {"a": 1}, [[]], [None] * 3, {"": {"": []}}, "9" * 4000,
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in a manifest."""
    if path[:2] in LEFT_ALONE:
        return
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def at(manifest: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        manifest = manifest[key]
    return manifest


def may_be(old: Any, new: Any, path: tuple[Any, ...]) -> bool:
    """Whether no check could tell ``new`` from a value that was saved there."""
    is_number = type(new) in (int, float)
    if path[:3] == ("state", "engine_state", "rules"):
        # other numbers of an optimizer are as good; without any it computes them again
        return is_number or new in ({}, [])
    return type(old) is float and is_number and new > 0


def replaced(manifest: dict[str, Any], rng: random.Random) -> None:
    path = rng.choice([*places(manifest)])
    old = at(manifest, path)
    at(manifest, path[:-1])[path[-1]] = rng.choice([new for new in JUNK if new != old and not may_be(old, new, path)])


def retyped(manifest: dict[str, Any], rng: random.Random) -> None:
    """A number as text or in a list, a list as an object, an object as a list of pairs."""
    path = rng.choice([*places(manifest)])
    old = at(manifest, path)
    forms = [[old], {"value": old}, json.dumps(old)]
    if isinstance(old, dict):
        forms += [list(old.items()), list(old)]
    if isinstance(old, list):
        forms.append({str(number): item for number, item in enumerate(old)})
    at(manifest, path[:-1])[path[-1]] = rng.choice(forms)


def dropped(manifest: dict[str, Any], rng: random.Random) -> None:
    path = rng.choice([path for path in places(manifest) if path[2:3] != ("rules",)])
    del at(manifest, path[:-1])[path[-1]]


def added(manifest: dict[str, Any], rng: random.Random) -> None:
    """Another field, or an item once more."""
    path = rng.choice([p for p in [(), *places(manifest)] if isinstance(at(manifest, p), dict | list)])
    parent = at(manifest, path)
    if isinstance(parent, dict):
        parent[rng.choice(["zz", "", "step", "__class__", "../x"])] = rng.choice(JUNK)
    else:
        parent.append(deepcopy(rng.choice(parent)) if parent else rng.choice(JUNK))


def exchanged(manifest: dict[str, Any], rng: random.Random) -> None:
    """Two items of a list, or one field of two items."""
    lists = [at(manifest, p) for p in places(manifest) if isinstance(at(manifest, p), list)]
    items = rng.choice([items for items in lists if len(items) > 1])
    one, other = rng.sample(range(len(items)), 2)
    if rng.random() < 0.5 and isinstance(items[one], dict):
        field = rng.choice([key for key in items[one] if key in items[other]])
        items[one][field], items[other][field] = items[other][field], items[one][field]
    else:
        items[one], items[other] = items[other], items[one]


def renamed(manifest: dict[str, Any], rng: random.Random) -> None:
    path = rng.choice([p for p in places(manifest) if isinstance(p[-1], str) and p[2:3] != ("rules",)])
    parent = at(manifest, path[:-1])
    parent[rng.choice([path[-1].upper(), f"{path[-1]}s", f" {path[-1]}", "a" * 500])] = parent.pop(path[-1])


def nudged(manifest: dict[str, Any], rng: random.Random) -> None:
    """A number that is one more or less; another counter of the state may be as good."""
    whole = [p for p in places(manifest) if type(at(manifest, p)) is int and p[0] != "state"]
    path = rng.choice(whole)
    at(manifest, path[:-1])[path[-1]] += rng.choice((-1, 1))


def raw_text(manifest: dict[str, Any], rng: random.Random) -> bytes:
    """Text that no encoder writes."""
    text = canonical_json(manifest)
    number = rng.choice([*re.finditer(rb'(?<=[a-z_]":)-?[0-9][0-9.e+-]*', text)])
    digits = rng.choice((b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e999", b"9" * 5000, b"[" * 2000, b"0x1", b""))
    again = rng.choice((b'"step":', b'"state":', b'"applied_steps":'))
    return rng.choice(
        [
            text[: number.start()] + digits + text[number.end() :],
            text.replace(again, again + b"3," + again, 1),
            text[: rng.randrange(len(text))],
        ]
    )


EDITS = (replaced, retyped, dropped, added, exchanged, renamed, nudged)
KINDS = {edit.__name__: edit for edit in (*EDITS, raw_text)}


# -- the check ---------------------------------------------------------------------------------------------------------


def refusal(template: Template, path: Path) -> tuple[str, State]:
    """Loads; returns the refusal, empty if there was none, and the engine's state then."""
    before = template.rest()
    refused, extra = "", template.extra
    try:
        extra = template.engine.load(path)
    except DtrainError as error:
        refused = str(error)
    state = state_of(template.engine)
    assert not refused or state == before, f"a load that was refused has changed the engine: {refused}"
    assert extra == template.extra
    return refused, state


def try_one(template: Template, folder: Path, seed: int) -> str:
    """Returns the outcome of one edit."""
    rng = random.Random(seed)
    edit = KINDS[list(KINDS)[seed % len(KINDS)]]
    directory = folder / str(seed) / "checkpoints"
    shutil.copytree(template.folder / "checkpoints", directory)
    sealed(lambda manifest: edit(manifest, rng))(directory / NEWEST)
    began = time.process_time()
    problem = next(item.problem for item in verify(directory).checkpoints if item.path.name == NEWEST)
    refused, state = refusal(template, directory / NEWEST)
    if problem is None and not refused:
        assert state == template.states[NEWEST], "other values were loaded than were saved"
        result = "harmless"
    elif problem is None:  # for the engine alone: a checkpoint of another model is no damaged one
        result = "refused by the engine"
    else:
        assert problem.partition(":")[0] in refused, (problem, refused)
        refused, state = refusal(template, directory)
        assert not refused
        assert state == template.states[OLDER], "the older checkpoint was not the one that was used"
        assert [path.name for path in directory.iterdir() if path.name.startswith(f"bad-{NEWEST}-")]
        result = "refused"
    assert time.process_time() - began < LIMIT_S * (1 if result != "refused" else 2)
    shutil.rmtree(directory.parent)
    return result


@FEW_AND_MANY
def test_edits_with_a_valid_hash(template: Template, tmp_path: Path, many: bool, faults: FaultCounts) -> None:
    """The tables of ``test_checkpoint_damage`` and ``test_training_state`` have edits that contradict each other."""
    count, first = faults.count(ci=90, full=900) if many else 2 * len(KINDS), 10_000 + 1000 * many
    found: Counter[str] = Counter()
    wrong = []
    for seed in range(first, first + count):
        try:
            found[try_one(template, tmp_path, seed)] += 1
        except Exception as error:
            wrong.append(f"{list(KINDS)[seed % len(KINDS)]} with seed {seed}: {type(error).__name__}: {error!s:.300}")
    assert not wrong, "\n".join(wrong)
    assert found["refused"] > 0.6 * count
    figures = {key.replace(" ", "_"): number for key, number in found.items()}
    faults.passed("F5", count, seed=first, wrong=len(wrong), **figures)
