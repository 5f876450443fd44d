from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dtrain.checkpoint import CheckpointReader, ReadTarget, Snapshot, open_newest, read_targets, reader, save
from tests.helpers.checkpoints import ALONE, Tensors, on_threads, shards_of

SHAPE = (6, 4, 5, 3)
IMAGE = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
TENSORS = {("master", "w"): IMAGE, ("master", "other"): torch.arange(50.0), ("buffer", "flag"): torch.tensor(True)}


def saved(folder: Path, world: int, tensors: Tensors = TENSORS) -> CheckpointReader:
    """``tensors``, the sharded ones cut evenly over ``world`` ranks."""
    results = on_threads(world, lambda comm: save(folder, Snapshot(1, shards_of(tensors, comm.rank, world), {}), comm))
    assert all(isinstance(result, Path) for result in results), results
    return open_newest(folder, ALONE)


def targets() -> dict[str, Tensor]:
    """Tensors of IMAGE's shape, with other strides and dtypes."""
    return {
        "contiguous": torch.zeros(SHAPE),
        "channels last": torch.zeros(SHAPE).to(memory_format=torch.channels_last),
        "transposed": torch.zeros(SHAPE[::-1]).permute(3, 2, 1, 0),
        "with gaps": torch.zeros(6, 4, 5, 6)[..., ::2],
        "cast and transposed": torch.zeros(SHAPE[::-1], dtype=torch.bfloat16).permute(3, 2, 1, 0),
        "a parameter": torch.nn.Parameter(torch.zeros(SHAPE)),
    }


@pytest.mark.parametrize(("world", "staging_bytes"), [(1, 8), (3, 100), (3, read_targets.STAGING_BYTES)])
def test_any_tensor_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int, staging_bytes: int) -> None:
    monkeypatch.setattr(read_targets, "STAGING_BYTES", staging_bytes)
    found = saved(tmp_path, world)
    for name, target in targets().items():
        other, flag = torch.zeros(20, dtype=torch.float64), torch.tensor(False)
        wanted = (("master", "w", 0, target), ("master", "other", 30, other), ("buffer", "flag", 0, flag))
        found.read_into([ReadTarget(*target) for target in wanted])
        assert torch.equal(target, IMAGE.to(target.dtype)), name
        assert torch.equal(other, torch.arange(30.0, 50.0, dtype=torch.float64)), name
        assert flag, name


def test_no_other_bytes_are_read_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, bytes_read = saved(tmp_path, 2), []
    found.read("master", "w")  # the headers
    real = reader.read_into

    def count(descriptor: int, file: str, offset: int, target: memoryview) -> None:
        bytes_read.append(len(target))
        real(descriptor, file, offset, target)

    monkeypatch.setattr(reader, "read_into", count)
    memory = torch.full((100,), 0.5)
    found.read_into([ReadTarget("master", "w", 150, memory[10:80]), ReadTarget("master", "w", 0, memory[90:90])])
    assert torch.equal(memory[10:80], IMAGE.view(-1)[150:220])
    assert memory[:10].eq(0.5).all()
    assert memory[80:].eq(0.5).all()
    assert bytes_read == [30 * 4, 40 * 4]
