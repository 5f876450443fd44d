"""Saves and loads by real ranks."""

import os
import re
import time
from pathlib import Path

import pytest
import torch

import dtrain
from dtrain.checkpoint import Snapshot, open_newest, save, shared_folder, verify
from dtrain.checkpoint.snapshot import TensorShard
from dtrain.distributed.startup.setup import connect
from dtrain.errors import CheckpointError
from tests.helpers.checkpoints import make_tensors, shards_of
from tests.helpers.damage import R1, flip
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes


CPU = torch.device("cpu")
FOLDERS = {"links": ("shared", "shared-2"), "one rank": ("shared", "home-")}


def _save(rank: int, world: int, directory: Path, step: int) -> str:
    snapshot = Snapshot(step, shards_of(make_tensors(step), rank, world), {"world_size": world})
    return save(directory, snapshot, connect(CPU)).name


def _load_and_check(rank: int, world: int, directory: Path) -> tuple[int, int]:
    comm = connect(CPU)
    reader = open_newest(directory, comm)
    held = []
    for want in shards_of(make_tensors(reader.step), rank, world):
        data = reader.read(want.kind, want.name, want.start, want.stop)
        assert torch.equal(data, want.data)
        held.append(TensorShard(want.name, want.kind, want.shape, want.dtype, want.start, want.stop, data))
    reader.check_fingerprints(held, comm)
    return reader.step, reader.state["world_size"]


def test_all_ranks_pass_over_a_damaged_one_and_use_the_same(tmp_path: Path) -> None:
    for step in (10, 20):
        run_ranks(2, _save, tmp_path, step)
    flip(R1, 1.0)(tmp_path / "step-00000020")  # verified only by rank 1
    assert run_ranks(2, _load_and_check, tmp_path) == [(10, 2)] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad-step-00000020-hash", "step-00000010"]


def _save_where_one_cannot(rank: int, world: int, directory: Path) -> str:
    shared_folder.LIMIT_S = 0.2  # for names that a host may see late
    if rank == 1:
        directory = directory / "elsewhere"  # as on a host that does not share the file system
    with pytest.raises(CheckpointError) as error:
        _save(rank, world, directory, 20)
    return str(error.value)


def test_rank_without_the_shared_directory_stops_the_save(tmp_path: Path) -> None:
    run_ranks(2, _save, tmp_path, 10)
    for message in run_ranks(2, _save_where_one_cannot, tmp_path):
        assert re.search("failed on rank 1: rank 1 on host .* does not see .*/elsewhere/step-00000020.tmp-", message)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    assert verify(tmp_path).ok


def _use_folders(rank: int, world: int, root: Path, engine: str) -> dict[str, list[str]]:
    """Saves and loads with folders that differ between the ranks in their text or in fact; returns the messages."""
    torch.manual_seed(0)
    own = dtrain.initialize(torch.nn.Linear(4, 4), engine=engine, precision="fp32", seed=0)
    home = root / f"home-{rank}"
    home.mkdir()
    (home / "link").symlink_to(root / "shared")
    os.chdir(home)

    def step() -> None:
        own.backward(own(torch.ones(2, 4)).square().mean())
        own.step()

    different = {
        "temporary": home / "checkpoints",
        "relative": Path("checkpoints"),
        "links": root / "shared" if rank == 0 else root / "shared-2",
        "one rank": root / "shared" if rank < world - 1 else home,
    }
    messages: dict[str, list[str]] = {}
    began = time.monotonic()
    for name, folder in different.items():
        for use in (own.save, lambda f: own.save(f, asynchronous=True), own.load):
            with pytest.raises(CheckpointError) as failure:
                use(folder)
            messages.setdefault(name, []).append(str(failure.value))
    assert time.monotonic() - began < shared_folder.LIMIT_S / 3
    shared = root / "shared"
    same: list[str | Path] = [home / "link", "link", f"{shared}/", root / "home-0" / ".." / "shared", shared]
    for number, given in enumerate(same):
        step()
        path = own.save(given, asynchronous=number % 2 == 1)
        own.wait_for_save()
        assert path is not None
        assert own.load(given if rank else same[0]) == {}
        own.load(path)
    assert own.attempted_steps == len(same)
    return messages


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("engine", ["native", "fsdp2"])
def test_ranks_with_different_folders_are_refused_at_once(tmp_path: Path, engine: str, world: int) -> None:
    """They would wait for names that never appear; the engine goes on, and links to one folder are the same."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared-2").symlink_to(tmp_path / "elsewhere")
    ranks = run_ranks(world, _use_folders, tmp_path, engine)
    assert all(found == ranks[0] for found in ranks)
    for name, (now, later, loaded) in ranks[0].items():
        assert now == later
        assert now.startswith("saving step 0: the ranks were given different folders, ")
        assert loaded.startswith("loading a checkpoint: the ranks ")
        first, last = FOLDERS.get(name, ("home-0/checkpoints", f"home-{world - 1}/checkpoints"))
        for message in (now, loaded):
            assert f"{tmp_path}/{first} on rank 0, {tmp_path}/" in message
            assert re.search(rf"{tmp_path}/{last}.* on rank [0-9, ]*{world - 1}; give all ranks the same one", message)
    assert {path.name for path in tmp_path.iterdir()} == {"shared", "shared-2", *(f"home-{r}" for r in range(world))}
