"""The simulation of malloc's heap."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dtrain.planning.heap import LIMIT, Heap

KIB, MIB = 2**10, 2**20
BESIDE = 96  # bytes of the remainders of a block


def test_small_objects_keep_neighboring_holes_apart() -> None:
    peaks = []
    for num_objects in (0, 2):
        heap = Heap(num_objects)
        for key in range(64):
            heap.allocate(key, MIB)
        before = heap.peak
        for key in range(20, 60, 4):
            heap.release(key)
            heap.release(key + 1)
        for key in range(100, 110):
            heap.allocate(key, 2 * MIB - KIB)
        peaks.append(heap.peak - before)
    assert peaks[0] == 0
    assert peaks[1] > 7 * MIB


def test_a_hole_does_not_fit_a_block_of_its_size() -> None:
    heap = Heap(1)
    for key in range(64):
        heap.allocate(key, MIB)
    before = heap.peak
    heap.release(30)
    heap.allocate(100, MIB)
    assert heap.peak > before + MIB
    heap.allocate(101, MIB - KIB)
    assert heap.peak < before + MIB + KIB


def test_smaller_blocks_share_a_hole() -> None:
    heap = Heap(0)
    heap.allocate(0, 8 * MIB)
    heap.allocate(1, MIB)
    heap.release(0)
    for key in range(2, 9):
        heap.allocate(key, MIB)
    assert heap.peak == 9 * MIB + 2 * BESIDE


def test_trimming_gives_the_free_end_back() -> None:
    heap = Heap(0)
    for key in range(64):
        heap.allocate(key, MIB)
    for key in range(44, 64):
        heap.release(key)
    assert heap.peak > 64 * MIB
    heap.trim()
    assert heap.peak < 45 * MIB


def test_mapped_blocks_go_back_to_the_system() -> None:
    heap = Heap(1)
    for key in range(5):
        heap.allocate(key, LIMIT)
        heap.release(key)
    assert heap.peak == LIMIT


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 64 * KIB)), max_size=80), st.integers(0, 3))
def test_blocks_never_overlap_and_the_heap_holds_them(steps: list[tuple[int, int]], num_objects: int) -> None:
    heap, held = Heap(num_objects), {}
    for key, nbytes in steps:
        if key in held:
            heap.release(key)
            del held[key]
        else:
            heap.allocate(key, nbytes)
            held[key] = nbytes
        spans = sorted(
            [(start, start + size) for start, size in heap._blocks.values()]
            + [(start, start + size) for start, size in heap._starting.items()]
            + [(start, start + size) for start, size in heap._remainders]
            + [(start, start + size) for own in heap._objects.values() for start, size in own]
        )
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert sum(end - start for start, end in spans) == heap._end
        assert heap.peak >= heap._end
        assert len(heap._holes) == len(heap._starting) == len(heap._ending)
