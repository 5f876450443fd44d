"""A save beside training: what is copied to the host, where it lies there, and what waits for it."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.checkpoint.async_saver import AsyncSaver
from dtrain.checkpoint.snapshot import HostCopy, Snapshot, _pinned_block, _places
from dtrain.distributed.transport.single_rank import SingleRank
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


def test_pinned_memory_is_little_more_than_the_shards() -> None:
    """torch rounds each allocation up to a power of two: 64 GiB for the 36 GiB of 3B parameters in one block."""
    hidden, layers, ffn, kv, vocab = 3072, 28, 8192, 1024, 128256
    layer = [(hidden + 2 * kv) * hidden, hidden * hidden, 2 * ffn * hidden, ffn * hidden, hidden, hidden]
    nbytes = [4 * numel for numel in [vocab * hidden, *(layer * layers), hidden] for _ in range(3)]
    block = _pinned_block(nbytes)
    count = 1 + max(number for number, _ in _places(nbytes, block))
    assert block == 1 << (block.bit_length() - 1)
    assert sum(nbytes) <= count * block < 1.15 * sum(nbytes)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 5000), max_size=60))
def test_no_two_shards_share_a_byte(nbytes: list[int]) -> None:
    block = _pinned_block(nbytes)
    taken: dict[int, list[tuple[int, int]]] = {}
    for size, (number, start) in zip(nbytes, _places(nbytes, block), strict=True):
        assert start % 64 == 0
        assert start + size <= block
        taken.setdefault(number, []).append((start, start + size))
    for ranges in taken.values():
        ordered = sorted(ranges)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(ordered))


def _snapshot(*numels: int) -> Snapshot:
    tensors = {("master", f"w{i}"): torch.full((n,), float(i)) for i, n in enumerate(numels)}
    return Snapshot(1, tuple(shard(key, tensor, 0, tensor.numel()) for key, tensor in tensors.items()), {})


@pytest.mark.parametrize("in_blocks", [False, True])
def test_memory_is_kept_for_snapshots_that_fit(in_blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks as on a GPU; the pinning itself needs one."""
    copy = HostCopy(torch.device("cpu"))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory, **options: empty(*args, **options))
    for numels, grows in [((5, 300, 0, 7), True), ((5, 300, 0, 7), False), ((3,), False), ((2000, 9), True)]:
        snapshot = _snapshot(*numels)
        before = [block.data_ptr() for block in copy._blocks]
        copy._on_gpu = in_blocks
        copy.reserve(snapshot)
        copy._on_gpu = False
        assert ([block.data_ptr() for block in copy._blocks] != before) == grows
        taken = copy.take(snapshot)
        for i, (held, numel) in enumerate(zip(taken.shards, numels, strict=True)):
            assert torch.equal(held.data, torch.full((numel,), float(i)))
