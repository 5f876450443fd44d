"""The state of an engine in a manifest: what is refused, in which words, and what older checkpoints may lack."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

import dtrain
from dtrain.checkpoint import Snapshot, list_checkpoints, save, verify
from dtrain.checkpoint.format.training_state import TrainingState
from dtrain.errors import CheckpointError, ConfigError
from tests.helpers.checkpoints import ALONE, make_tensors, shards_of
from tests.helpers.damage import MANIFEST, sealed
from tests.helpers.one_rank import masters, start, train_step, unchanged

Edit = Callable[[dict[str, Any]], Any]


def engine_with(path: Path, **options: Any) -> Any:
    """An engine that has saved steps 1 and 2 in ``path`` and taken one more."""
    engine = start(loss_scale=dtrain.LossScale("dynamic", hysteresis=2), **options)
    for _ in range(2):
        train_step(engine)
        engine.data_cursor += 16
        engine.save(path)
    train_step(engine)
    return engine


def replacing(*keys: str, **values: Any) -> Edit:
    """Replaces values of the mapping that lies under ``keys``."""
    return lambda state: reduce(getitem, keys, state).update(values)


part, counters, random_state = replacing, partial(replacing, "engine_state"), partial(replacing, "rng")
scale = partial(counters, "loss_scale")
rule = partial(scale, "rule")
IMPOSSIBLE: dict[str, tuple[Edit, str]] = {  # the engine's state after step 2 in one file, and how it is refused
    "step": (counters(attempted_steps=-5), "engine_state.attempted_steps=-5 is too small; it must be at least 0"),
    "other step": (counters(attempted_steps=3), "attempted_steps=3; expected 2, the checkpoint's step"),
    "applied": (counters(applied_steps=3), "applied_steps=3; expected a whole number from 0 to attempted_steps=2"),
    "fraction": (counters(applied_steps=1.5), "engine_state.applied_steps=1.5 is not a whole number"),
    "truth": (counters(applied_steps=True), "engine_state.applied_steps=true is not a whole number"),
    "huge": (counters(applied_steps=2**63), "engine_state.applied_steps=9223372036854775808 is too large"),
    "missing": (lambda state: state["engine_state"].pop("applied_steps"), "engine_state.applied_steps is missing"),
    "list": (part(engine_state=[1]), "state.engine_state=[1] is not a mapping"),
    "cursor": (part(data_cursor=-16), "state.data_cursor=-16 is too small"),
    "seed": (random_state(seed=-1), "state.rng.seed=-1 is too small"),
    "no seed": (random_state(seed=None), "state.rng.seed=null; expected a whole number"),
    "keys": (random_state(keyed_by=["rank"]), "keyed_by=[rank]; expected [seed,attempted_steps,global_micro_batch]"),
    "scale": (scale(scale=-1.0), "loss_scale.scale=-1.0 is impossible in mode dynamic: expected a finite"),
    "scale's type": (scale(scale=None), "loss_scale.scale=null is not a number"),
    "clean steps": (scale(clean_steps=3), "loss_scale.clean_steps=3; expected a whole number from 0 to attempted"),
    "measured": (scale(num_measured=3), "loss_scale.num_measured=3; expected a whole number from 0 to applied_steps=2"),
    "hysteresis": (scale(overflows_left=3), "loss_scale.overflows_left=3 is impossible in mode"),
    "rule": (rule(growth_factor=0.5), "loss_scale.rule.growth_factor=0.5 is too small; it must be at least 1"),
    "mode": (rule(mode="auto"), "loss_scale.rule.mode=auto, which becomes another mode before the first step"),
    "constant scale": (rule(mode="none"), "is impossible in mode none: expected a finite number from 1 to 1"),
    "calibration": (
        lambda state: (rule(mode="calibrated")(state), state["engine_state"]["loss_scale"].pop("num_measured")),
        "loss_scale.num_measured is missing; mode calibrated needs it",
    ),
    "rules": (counters(rules=[{"applied_steps": 3}]), "rules[0].applied_steps=3; expected a whole number from 0 to"),
    "world size": (part(world_size=2), "state.world_size=2; expected 1, a data file for each rank"),
    "shard size": (part(world_size=4, shard_size=2), "state.shard_size=2; expected 1, a data file for each rank of a"),
    "replicas": (part(world_size=3, shard_size=2), "state.shard_size=2; expected a divisor of world_size=3"),
    "stage": (part(zero_stage=4), "state.zero_stage=4 is too large; it must be at most 3"),
    "extra": (part(extra=["a"]), "state.extra=[a] is not a mapping"),
    "run": (part(run_id=""), "state.run_id=; expected 1 to 200 characters"),
    "engine": (part(engine="DDP"), "state.engine=DDP; expected a lower-case word"),
    "source": (part(frozen_source={"path": "a"}), "state.frozen_source"),
    "modules": (replacing("contract", modules=[]), "state.contract has no mapping 'modules'"),
    "format": (replacing("contract", "modules", x={"kind": "Linear"}), "modules['x'].format is missing"),
}  # fmt: skip


def state_of(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((path / MANIFEST).read_bytes().partition(b"\n")[2])["state"]
    return state


def test_impossible_states_are_refused_by_name(tmp_path: Path) -> None:
    engine_with(tmp_path)
    saved = state_of(tmp_path / "step-00000002")
    for name, (edit, message) in IMPOSSIBLE.items():
        edit(state := deepcopy(saved))
        with pytest.raises(ConfigError) as error:
            TrainingState.of(state, step=2, num_files=1)
        assert message in str(error.value), name


def test_a_checkpoint_of_an_impossible_state_is_damaged_and_the_older_one_used(tmp_path: Path) -> None:
    engine = engine_with(tmp_path)
    newest = tmp_path / "step-00000002"
    engine.load(tmp_path / "step-00000001")
    older = masters(engine)
    engine.load(newest)
    before = masters(engine)
    sealed(lambda manifest: counters(applied_steps=3)(manifest["state"]))(newest)
    problem = str(verify(tmp_path).checkpoints[1].problem)
    assert problem.startswith(f"{MANIFEST}: state.engine_state.applied_steps=3; expected")
    assert not list_checkpoints(tmp_path)[1].ok
    with pytest.raises(CheckpointError, match=r"step-00000002 cannot be used: manifest\.json: "):
        engine.load(newest)
    assert unchanged(engine, before)
    assert train_step(engine).applied, "the engine is as it was"
    engine.load(tmp_path)
    assert (engine.attempted_steps, engine.applied_steps, engine.data_cursor) == (1, 1, 16)
    assert unchanged(engine, older)
    assert (tmp_path / "bad-step-00000002-state").is_dir()


def test_states_of_older_checkpoints_load(tmp_path: Path) -> None:
    """Fields that came later are optional; those of another version are ignored."""

    def as_before(manifest: dict[str, Any]) -> None:
        state = manifest["state"]
        for name in ("contract", "versions", "aliases", "metrics", "config", "config_hash", "zero_stage", "optimizer"):
            del state[name]
        del state["engine_state"]["rules"]
        saved = state["engine_state"]["loss_scale"]
        for name in ("is_calibrated", "max_abs_grad", "num_measured"):
            del saved[name]
        for name in ("calibration_steps", "margin"):
            del saved["rule"][name]
        state["engine_state"]["later"] = {"a": 1}

    engine = engine_with(tmp_path)
    engine.load(tmp_path)
    before, scaled = masters(engine), engine.loss_scale
    train_step(engine)
    sealed(as_before)(tmp_path / "step-00000002")
    assert verify(tmp_path).ok
    engine.load(tmp_path)
    assert (engine.attempted_steps, engine.applied_steps, engine.loss_scale) == (2, 2, scaled)
    assert unchanged(engine, before)


def test_optimizer_state_without_its_master_is_refused(tmp_path: Path) -> None:
    engine_with(tmp_path)

    def transpose(manifest: dict[str, Any]) -> None:
        entry = next(item for item in manifest["tensors"] if item["kind"] == "exp_avg" and len(item["shape"]) == 2)
        entry["shape"] = [4, 1] if entry["shape"] == [1, 4] else [2, 8]

    sealed(transpose)(tmp_path / "step-00000002")
    problem = verify(tmp_path).checkpoints[1].problem
    assert problem is not None
    assert "exp_avg:0.weight: expected a master of its shape [2, 8], got [4, 4]" in problem


def test_a_save_refuses_what_a_load_would_refuse(tmp_path: Path) -> None:
    engine = engine_with(tmp_path)
    engine.attempted_steps = 1
    with pytest.raises(CheckpointError, match=r"applied_steps=3; expected a whole number from 0 to attempted_steps=1"):
        engine.save(tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()


def test_tensors_that_no_engine_saved_verify_but_no_engine_loads_them(tmp_path: Path) -> None:
    engine = start()
    before = masters(engine)
    path = save(tmp_path, Snapshot(2, shards_of(make_tensors(), 0, 1), {"mine": [1]}), ALONE)
    assert verify(path).ok
    with pytest.raises(CheckpointError, match="holds no state of an engine, only tensors"):
        engine.load(path)
    assert unchanged(engine, before)


def test_numbers_of_another_optimizer_are_refused_before_anything_is_overwritten(tmp_path: Path) -> None:
    engine = engine_with(tmp_path, optimizer=dtrain.TorchOptimizer("torch.optim:NAdam", lr=1e-3))
    before = masters(engine)
    sealed(lambda m: m["state"]["engine_state"]["rules"][0].pop("mu_product"))(tmp_path / "step-00000002")
    with pytest.raises(CheckpointError, match=r"numbers \['applied_steps'\] of optimizer group 0, this run's"):
        engine.load(tmp_path)
    assert unchanged(engine, before)
    assert (tmp_path / "step-00000002").is_dir(), "of another optimizer, not damaged"


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    engine_with(tmp_path)
    state = state_of(tmp_path / "step-00000002")
    found = TrainingState.of(deepcopy(state), step=2, num_files=1)
    assert found is not None
    assert found.engine_state.loss_scale.to_dict() == state["engine_state"]["loss_scale"]
    assert (found.run_id, found.rng.seed, found.extra, found.contract) == (state["run_id"], 0, {}, state["contract"])
    replicated = TrainingState.of({**state, "world_size": 6, "shard_size": 1}, step=2, num_files=1)
    assert replicated is not None
    assert (replicated.world_size, replicated.shard_size) == (6, 1)
