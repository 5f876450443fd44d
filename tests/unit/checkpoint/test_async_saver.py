"""A save that training waits for, beside a GPU."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from dtrain.checkpoint.async_saver import AsyncSaver
from dtrain.checkpoint.snapshot import Snapshot
from dtrain.distributed.single_rank import SingleRank
from tests.helpers.checkpoints import shard


def test_only_what_lies_on_the_gpu_is_copied_first(tmp_path: Path) -> None:
    """Offloaded states are many times the memory of what lies on the GPU."""
    comm = SingleRank(torch.device("cuda", 0))
    copied: list[str] = []

    def copy(self: AsyncSaver, snapshot: Snapshot) -> Snapshot:
        copied.extend(one.name for one in snapshot.shards)
        return snapshot

    on_device = shard(("master", "on the device"), torch.arange(4.0, device="meta"), 0, 4)
    shards = shard(("master", "on the host"), torch.arange(4.0), 0, 4), on_device
    saved: list[Snapshot] = []

    def save(directory: Path, snapshot: Snapshot, *_: Any, **__: Any) -> Path:
        saved.append(snapshot)
        return directory

    with mock.patch.object(AsyncSaver, "_copied", copy), mock.patch("dtrain.checkpoint.async_saver.save", save):
        AsyncSaver(comm).save(tmp_path, Snapshot(3, shards, {}), None)
    assert copied == ["on the device"]
    assert {one.name: one.data.data_ptr() for one in saved[0].shards}["on the host"] == shards[0].data.data_ptr()
    assert len(saved[0].shards) == 2


def test_a_rank_that_waits_for_its_thread_waits_for_the_ranks_of_the_thread() -> None:
    """A watcher sees it, also if a rank of another host has gone for good."""
    saver, ended = AsyncSaver(SingleRank(torch.device("cpu"))), threading.Event()
    saver._thread_comm = SingleRank(torch.device("cpu"))
    saver._thread_comm.schedule.progress.enter(7, "commit")
    saving = threading.Thread(target=ended.wait)
    joining = threading.Thread(target=saver._join, args=(saving,))
    progress = saver._comm.schedule.progress
    for thread in (saving, joining):
        thread.start()
    try:
        deadline = time.monotonic() + 10
        while not progress.is_waiting and time.monotonic() < deadline:
            time.sleep(0.01)
        changes = progress.num_changes
        time.sleep(0.6)
        assert progress.is_waiting
        assert progress.num_changes == changes, "a wait without an end counted as progress"
    finally:
        ended.set()
        joining.join()
    assert not progress.is_waiting
