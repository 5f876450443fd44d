"""Frozen weights that a folder holds: checkpoints name it, and a load refuses another one."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import dtrain
from dtrain.checkpoint.format.integrity import verify_checkpoint
from dtrain.engine.adapters.native import NativeEngine
from dtrain.errors import CheckpointError, ConfigError, DivergenceError
from tests.distributed.test_frozen import message
from tests.helpers.adapted_models import Adapted, held, joined, same, start, train
from tests.helpers.damage import flip
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

DIM = 32


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The folder of the frozen weights of ``Adapted(DIM)``, in two files."""
    folder = tmp_path / "base"
    folder.mkdir()
    tensors = {name: p.detach() for name, p in Adapted(DIM).named_parameters() if not p.requires_grad}
    blocks = {name: values for name, values in tensors.items() if name.startswith("blocks.")}
    save_file(blocks, folder / "model-1.safetensors")
    save_file({name: values for name, values in tensors.items() if name not in blocks}, folder / "model-2.safetensors")
    return folder


def kinds(path: Path) -> dict[str, set[str]]:
    (found,) = path.glob("step*")
    manifest = verify_checkpoint(found)
    return {kind: {t.name for t in manifest.tensors if t.kind == kind} for kind in {t.kind for t in manifest.tensors}}


def run(rank: int, world: int, folder: str, base: str, stage: int, loaded: str | None) -> tuple[Any, ...]:
    """Trains two steps, or loads instead, and saves; then two more."""
    engine = start(stage, precision="bf16", frozen_source=dtrain.FrozenSource(base), reproducible=True)
    if loaded is None:
        train(engine, range(2))
    else:
        engine.load(loaded)
    engine.save(folder)
    frozen = held(engine)
    return frozen, train(engine, range(2, 4)), engine.master_state()


def test_a_checkpoint_names_the_folder_and_holds_no_frozen_weight(base: Path, tmp_path: Path) -> None:
    first = run_ranks(2, run, str(tmp_path / "first"), str(base), 3, None)
    held_kinds = kinds(tmp_path / "first")
    assert "frozen" not in held_kinds
    assert held_kinds["master"] == {name for name, p in Adapted(DIM).named_parameters() if p.requires_grad}
    moved = base.rename(tmp_path / "moved")
    for world, stage in ((1, 0), (2, 3)):
        again = run_ranks(world, run, str(tmp_path / f"{world}"), str(moved), stage, str(tmp_path / "first"))
        assert again[0][1] == first[0][1]
        assert same(again[0][2], first[0][2])
        assert same(joined([one[0] for one in again]), joined([one[0] for one in first]))


def test_another_source_is_refused(base: Path, tmp_path: Path) -> None:
    own = start(0, precision="bf16", frozen_source=dtrain.FrozenSource(str(base)))
    own.save(tmp_path / "run")
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(base.iterdir())]
    sha256 = hashlib.sha256("".join(lines).encode()).hexdigest()  # as sha256sum and sha256sum of its output
    assert own.states.frozen_source == dtrain.FrozenSource(str(base), sha256)
    without = start(0, precision="bf16", seed=1)
    before = without.module.get_parameter("blocks.1.up.weight").clone()
    said = message(CheckpointError, lambda: without.load(tmp_path / "run"))
    assert f"holds no frozen weights, they are those of {base} (sha256 {sha256[:12]})" in said
    assert torch.equal(without.module.get_parameter("blocks.1.up.weight"), before), "left as it is"
    flip("model-2.safetensors", 1.0)(base)
    other = start(0, precision="bf16", frozen_source=dtrain.FrozenSource(str(base)))
    said = message(CheckpointError, lambda: other.load(tmp_path / "run"))
    assert f"was trained over the frozen weights of {base} (sha256 {sha256[:12]}), this run has those of" in said
    assert other.states.frozen_source.sha256[:12] in said  # type: ignore[union-attr]


def test_older_checkpoints_load_and_what_was_written_is_saved(base: Path, tmp_path: Path) -> None:
    """A checkpoint with frozen weights may hold others than the folder, and so may an engine that was written to."""
    start(0, precision="bf16", seed=1).save(tmp_path / "older")
    source = dtrain.FrozenSource(str(base))
    engine = start(0, precision="bf16", frozen_source=source)
    engine.load(tmp_path / "older")
    assert engine.states.frozen_source is None
    assert torch.equal(engine.module.get_parameter("embedding.weight"), Adapted(DIM, 1).embedding.weight.bfloat16())
    engine.save(tmp_path / "loaded")
    assert len(kinds(tmp_path / "loaded")["frozen"]) == len(engine.states.frozen)

    def modify(engine: NativeEngine) -> None:
        with engine.modify_weights():
            engine.module.get_parameter("head.weight").mul_(2)
        assert engine.states.frozen_source is not None, "only a trained weight has changed"
        with engine.modify_weights():
            engine.module.get_parameter("norm.bias").add_(1)

    @torch.no_grad()
    def write(engine: NativeEngine) -> None:
        engine.module.get_parameter("norm.bias").add_(1)

    for number, change in enumerate((modify, write)):
        engine = start(0, precision="bf16", frozen_source=source)
        change(engine)
        engine.save(tmp_path / f"{number}")
        assert "norm.bias" in kinds(tmp_path / f"{number}")["frozen"]
        fresh = start(0, precision="bf16", frozen_source=source)
        fresh.load(tmp_path / f"{number}")
        assert torch.equal(fresh.module.get_parameter("norm.bias"), engine.module.get_parameter("norm.bias"))


def given_on_one_rank(rank: int, world: int, base: str) -> str:
    source = dtrain.FrozenSource(base) if rank == 0 else None
    return message(DivergenceError, lambda: start(0, precision="bf16", frozen_source=source))


def test_mistakes(base: Path, tmp_path: Path) -> None:
    for said in run_ranks(2, given_on_one_rank, str(base)):
        assert "frozen_source" in said
    for source, said in (
        (dtrain.FrozenSource(str(tmp_path / "none")), f"{tmp_path / 'none'} holds no *.safetensors"),
        (str(base), "is not a dtrain.FrozenSource(folder)"),
    ):
        assert said in message(ConfigError, lambda source=source: start(0, frozen_source=source))  # type: ignore[misc]
    with pytest.raises(ConfigError, match="expected 64 hex digits"):
        dtrain.FrozenSource(str(base), "12")
