"""A load needs little memory beside the state that it fills, however large a tensor is and however it was cut."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

NUMEL = 26_000_000  # FP32: even half of it, what one of two ranks holds, is more than the bound
BOUND = 48 << 20  # bytes


class Large(nn.Module):
    """One trained and one frozen weight, each larger than a load may take."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.arange(NUMEL, dtype=torch.float32))
        self.frozen = nn.Parameter(torch.arange(13_000_000, dtype=torch.float32), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x


def start(engine: str, precision: str) -> Any:
    return dtrain.initialize(Large(), engine=engine, zero_stage=2, precision=precision)


def resident(what: str) -> int:
    """Resident bytes: ``RSS`` now, or ``HWM``, the maximum since the last reset."""
    found = re.search(rf"Vm{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def save(rank: int, world: int, folder: Path) -> None:
    start("native", "fp32").save(folder)


def load(rank: int, world: int, folder: Path, engine: str) -> tuple[int, float]:
    """Returns the bytes that a load took beside the existing state, and the last weight of this rank."""
    running = start(engine, "bf16")  # so that the frozen weight, saved in FP32, is cast
    shards = [shard for kind in ("master", "exp_avg", "exp_avg_sq") for shard in running.local_shards(kind)]
    for shard in shards:
        shard.data.fill_(0.5)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    before = resident("RSS")
    running.load(folder)
    return resident("HWM") - before, shards[0].data[-1].item()


@pytest.mark.parametrize(("saved", "loaded", "engines"), [(1, 2, ("native", "fsdp2")), (2, 1, ("native",))])
def test_on_more_and_on_fewer_ranks(tmp_path: Path, saved: int, loaded: int, engines: tuple[str, ...]) -> None:
    run_ranks(saved, save, tmp_path)
    for engine in engines:
        taken, last = zip(*run_ranks(loaded, load, tmp_path, engine), strict=True)
        assert max(taken) <= BOUND, f"{engine} on {loaded}: {[size >> 20 for size in taken]} MiB"
        assert last[-1] == torch.tensor(NUMEL - 1, dtype=torch.float32)
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()  # pytest keeps the folders of its last runs
