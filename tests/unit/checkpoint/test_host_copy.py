"""Where the shards of a snapshot lie in its host copy."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.checkpoint import Snapshot
from dtrain.checkpoint.snapshot import HostCopy, _pinned_block, _places
from tests.helpers.checkpoints import shard


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


_empty = torch.empty


def _unpinned(*args: Any, pin_memory: bool, **kwargs: Any) -> torch.Tensor:
    return _empty(*args, **kwargs)


@pytest.mark.parametrize("in_blocks", [False, True])
def test_memory_is_kept_for_snapshots_that_fit(in_blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks as on a GPU; the pinning itself needs one."""
    copy = HostCopy(torch.device("cpu"))
    monkeypatch.setattr(torch, "empty", _unpinned)
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
