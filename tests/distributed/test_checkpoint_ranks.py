"""Saves and loads by real ranks."""

import re
from pathlib import Path

import pytest
import torch

from dtrain.checkpoint import Snapshot, open_newest, save, shared_folder, verify
from dtrain.checkpoint.snapshot import TensorShard
from dtrain.distributed.startup.setup import connect
from dtrain.errors import CheckpointError
from tests.helpers.checkpoints import make_tensors, shards_of
from tests.helpers.damage import R1, flip
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes


CPU = torch.device("cpu")


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
