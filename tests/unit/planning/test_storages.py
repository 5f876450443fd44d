"""The count of live storages."""

from __future__ import annotations

import gc

import torch
from hypothesis import given
from hypothesis import strategies as st

from dtrain.planning.heap import LIMIT, Heap
from dtrain.planning.storages import StorageTracker


def test_storages_are_counted_once_until_they_are_freed() -> None:
    with StorageTracker() as tracker:
        first = torch.zeros(256)
        view = first[10:].view(-1)
        assert sum(tracker.live.values()) == 1024
        with tracker.labelled("forward"):
            second = first + 1
        del first
        assert tracker.live == {"other": 1024, "forward": 1024}  # the view holds the storage
        del view, second
        assert sum(tracker.live.values()) == 0
    assert tracker.peak == {"other": 1024, "forward": 1024}


def test_a_storage_can_be_given_another_kind_and_be_excluded() -> None:
    with StorageTracker() as tracker:
        one, other = torch.zeros(8), torch.zeros(16)
        tracker.relabel("master", [one[2:]])
        assert (tracker.live["master"], tracker.live["other"]) == (32, 64)
        tracker.exclude([other.untyped_storage()])
        assert (tracker.live["master"], tracker.live["other"]) == (32, 0)
        del other
        assert sum(tracker.live.values()) == 32


def test_heaps_take_what_is_counted() -> None:
    heap = Heap(1)
    with StorageTracker([heap]) as tracker:
        held = [torch.empty(LIMIT, dtype=torch.uint8), torch.empty(5000, dtype=torch.uint8)]
        assert heap.peak == LIMIT + 5096
        tracker.exclude([held[0].untyped_storage()])
        held.append(torch.empty(LIMIT - 1, dtype=torch.uint8))
    assert heap.peak == LIMIT - 1 + 96 + 5096
    assert tracker.largest == LIMIT


@given(st.lists(st.tuples(st.integers(0, 200), st.booleans()), max_size=30))
def test_the_peak_is_the_largest_sum(steps: list[tuple[int, bool]]) -> None:
    held: list[torch.Tensor] = []
    largest = 0
    with StorageTracker() as tracker:
        for numel, frees in steps:
            if frees and held:
                held.pop(0)
            held.append(torch.empty(numel))
            gc.collect(0)
            live = sum(tensor.nbytes for tensor in held)
            assert sum(tracker.live.values()) == live
            largest = max(largest, live)
    assert sum(tracker.peak.values()) == largest
