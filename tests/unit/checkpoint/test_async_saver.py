"""A save that training waits for, beside a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch

from dtrain.checkpoint.async_saver import AsyncSaver
from dtrain.checkpoint.snapshot import Snapshot, TensorShard
from dtrain.distributed.single_rank import SingleRank


def shard(name: str, device: str) -> TensorShard:
    return TensorShard(name, "master", (4,), torch.float32, 0, 4, torch.arange(4.0, device=device))


def test_only_what_lies_on_the_gpu_is_copied_first(tmp_path: Path) -> None:
    """Offloaded states are many times the memory of what lies on the GPU."""
    comm = SingleRank(torch.device("cuda", 0))
    copied: list[str] = []

    def copy(self: AsyncSaver, snapshot: Snapshot) -> Snapshot:
        copied.extend(one.name for one in snapshot.shards)
        return snapshot

    shards = (shard("on the host", "cpu"), shard("on the device", "meta"))
    saved: list[Snapshot] = []

    def save(directory: Path, snapshot: Snapshot, *_: Any, **__: Any) -> Path:
        saved.append(snapshot)
        return directory

    with mock.patch.object(AsyncSaver, "_copied", copy), mock.patch("dtrain.checkpoint.async_saver.save", save):
        AsyncSaver(comm).save(tmp_path, Snapshot(3, shards, {}), None)
    assert copied == ["on the device"]
    assert {one.name: one.data.data_ptr() for one in saved[0].shards}["on the host"] == shards[0].data.data_ptr()
    assert len(saved[0].shards) == 2
