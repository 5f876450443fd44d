from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from dtrain.planning.memory.heap import LIMIT, Heap
from dtrain.planning.memory.plan import peaks_of
from dtrain.planning.record.recorder import ACTIVATIONS, BACKWARD, OTHER, RecordedStep, StepRecorder

KIB, MIB = 2**10, 2**20


def peak_of(recorder: StepRecorder, *heaps: Heap) -> dict[str, int]:
    """Returns bytes by kind at the peak of all that is recorded."""
    step = RecordedStep(1, 0, recorder.storages[-1].born + 99, (), {})
    (peak,) = peaks_of(recorder.storages, [step], heaps)
    return peak


def test_storages_are_counted_once_by_kind_until_they_are_freed_or_of_others() -> None:
    with StepRecorder() as recorder:
        first = torch.zeros(256)
        view = first[10:].view(-1)
        assert len(recorder.storages) == 1
        with recorder.in_part(ACTIVATIONS):
            second = first + 1
        del first
        assert [storage.died for storage in recorder.storages] == [None, None]  # the view holds the storage
        del view, second
        assert all(storage.died for storage in recorder.storages)
        third = torch.zeros(512)
    assert third.numel() == 512
    assert [(storage.kind, storage.nbytes) for storage in recorder.storages] == [
        (OTHER, 1024),
        (ACTIVATIONS, 1024),
        (OTHER, 2048),
    ]
    with StepRecorder() as recorder:
        one, other = torch.zeros(8), torch.zeros(16)
        recorder.label("master", [one[2:]])
        recorder.label(None, [other])
    assert peak_of(recorder) == {"master": 32}


def test_the_peak_is_that_of_a_moment() -> None:
    with StepRecorder() as recorder:
        first = torch.zeros(256)
        with recorder.in_part(BACKWARD):
            second = first + 1
        del first, second
        third = torch.zeros(300)
    assert third.numel() == 300
    assert peak_of(recorder) == {OTHER: 1024, BACKWARD: 1024}


def test_heaps_take_what_is_counted() -> None:
    heap = Heap(1)
    with StepRecorder() as recorder:
        held = [torch.empty(LIMIT, dtype=torch.uint8), torch.empty(5000, dtype=torch.uint8)]
        recorder.label(None, held[:1])
        held.append(torch.empty(LIMIT - 1, dtype=torch.uint8))
    tensors = sum(peak_of(recorder, heap).values())
    assert heap.peak == tensors + 2 * 96 == LIMIT - 1 + 96 + 5096


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


def test_trimming_gives_the_free_end_back_and_a_release_what_is_mapped() -> None:
    heap = Heap(0)
    for key in range(64):
        heap.allocate(key, MIB)
    for key in range(44, 64):
        heap.release(key)
    assert heap.peak > 64 * MIB
    heap.trim()
    assert heap.peak < 45 * MIB
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
