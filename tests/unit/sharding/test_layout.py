"""The layout is arithmetic only, so its promises are checked on arbitrary shapes, world sizes and ranges."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.sharding.layout import ALIGNMENT, CHUNK, ArenaSegment, FlatLayout, ParameterSlot, ParamSpec, flat_layouts
from dtrain.sharding.placement import STAGES, Placement, memory_formula

REDUCED = torch.bfloat16
worlds = st.integers(1, 8)
shapes = st.one_of(
    st.just(()),
    st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple),
    st.integers(0, 5000).map(lambda n: (n,)),
)
dtypes = st.sampled_from([torch.float32, REDUCED, torch.float16, torch.float8_e4m3fn])
many_specs = st.lists(st.tuples(shapes, dtypes, st.integers(0, 2)), max_size=8).map(
    lambda rows: [ParamSpec(f"p{i}", shape, dtype, number) for i, (shape, dtype, number) in enumerate(rows)]
)
few = settings(max_examples=50)


@few
@given(many_specs, worlds)
def test_slots_classes_and_padding(specs: list[ParamSpec], world: int) -> None:
    """One aligned slot for each parameter, whole chunks of each class, and little else."""
    layouts = flat_layouts("g", specs, world)
    assert sorted(slot.spec.name for layout in layouts for slot in layout.slots) == sorted(s.name for s in specs)
    dtypes = [layout.dtype for layout in layouts]
    assert len(dtypes) == len(set(dtypes)), "one buffer a dtype"
    assert dtypes == sorted(dtypes, key=lambda dtype: dtype.itemsize)
    for layout in layouts:
        for slot in layout.slots:
            assert slot.spec.replica_dtype == layout.dtype
            assert slot.start % ALIGNMENT == 0
            assert slot.stop - slot.start == math.prod(slot.spec.shape)
            assert slot.stop <= layout.real_numel <= layout.numel
        assert all(before.stop <= after.start for before, after in itertools.pairwise(layout.slots))
        cursor = 0
        for number, start, stop in layout.classes:
            assert start == cursor
            assert stop % CHUNK == 0
            cursor = stop
            for slot in layout.slots:
                inside = start <= slot.start and slot.stop <= stop
                assert inside == (slot.spec.update_class == number) or not slot.spec.numel
        assert cursor == layout.real_numel
        numbers = [number for number, _, _ in layout.classes]
        assert numbers == sorted(set(numbers)), "in order, each class once"
        # less than an alignment a parameter, less than a chunk a class, less than a chunk a rank at the end
        inner = layout.real_numel - sum(slot.spec.numel for slot in layout.slots)
        assert 0 <= inner <= len(layout.slots) * (ALIGNMENT - 1) + len(layout.classes) * (CHUNK - 1)
        assert 0 <= layout.numel - layout.real_numel <= (world - 1) * CHUNK
        assert layout.shard_numel % CHUNK == 0
        assert layout.numel == world * layout.shard_numel


@few
@given(many_specs, worlds, worlds)
def test_slots_do_not_depend_on_the_world_size(specs: list[ParamSpec], one: int, other: int) -> None:
    for a, b in zip(flat_layouts("g", specs, one), flat_layouts("g", specs, other), strict=True):
        assert (a.slots, a.classes, a.extents, a.real_numel) == (b.slots, b.classes, b.extents, b.real_numel)


@few
@given(many_specs, worlds, st.data())
def test_intervals_of_any_range_map_each_element_to_its_parameter(
    specs: list[ParamSpec], world: int, data: st.DataObject
) -> None:
    for layout in flat_layouts("g", specs, world):
        start = data.draw(st.integers(0, layout.numel))
        stop = data.draw(st.integers(start, layout.numel))
        owner: list[tuple[str, int] | None] = [None] * layout.numel
        for slot in layout.slots:
            owner[slot.start : slot.stop] = [(slot.spec.name, i) for i in range(slot.spec.numel)]
        found: list[tuple[str, int] | None] = [None] * (stop - start)
        for interval in layout.intervals(start, stop):
            assert interval.start < interval.stop
            length = interval.stop - interval.start
            assert found[interval.offset : interval.offset + length] == [None] * length
            found[interval.offset : interval.offset + length] = [
                (interval.spec.name, i) for i in range(interval.start, interval.stop)
            ]
        assert found == owner[start:stop]


@few
@given(many_specs, worlds)
def test_segments_of_all_ranks_tile_and_map_back(specs: list[ParamSpec], world: int) -> None:
    for layout in flat_layouts("g", specs, world):
        held: dict[str, list[int]] = {slot.spec.name: [] for slot in layout.slots}
        starts = {slot.spec.name: slot.start for slot in layout.slots}
        flat = torch.arange(layout.numel)
        for rank in range(world):
            segment = Placement.SHARD.segment(layout, rank)
            assert (segment.start, segment.stop) == layout.shard(rank)
            assert segment.start == rank * layout.shard_numel
            local = segment.of(flat)
            assert local.tolist() == list(range(segment.start, segment.stop))
            assert torch.equal(segment.shard_of(local, rank), local)
            for interval in segment.intervals():
                assert interval.start < interval.stop
                held[interval.spec.name] += range(interval.start, interval.stop)
                assert int(local[interval.offset]) == starts[interval.spec.name] + interval.start
            covered = sum(high - low for _, low, high in segment.class_ranges())
            real = min(max(layout.real_numel - segment.start, 0), segment.numel)
            assert covered == real, "hyper-parameters for every chunk except padding at the end"
            assert all(low % CHUNK == 0 and high % CHUNK == 0 for _, low, high in segment.class_ranges())
            classes = [number for number, low, high in segment.class_ranges() for _ in range(low, high)]
            for slot in layout.slots:
                low, high = max(slot.start, segment.start), min(slot.stop, segment.stop)
                assert low >= high or set(classes[low - segment.start : high - segment.start]) == {
                    slot.spec.update_class
                }
        for slot in layout.slots:
            assert sorted(held[slot.spec.name]) == list(range(slot.spec.numel)), "no gap and no overlap"


@few
@given(many_specs, worlds, st.integers(0, 7))
def test_a_replicated_segment_holds_the_whole_buffer(specs: list[ParamSpec], world: int, rank: int) -> None:
    for layout in flat_layouts("g", specs, world):
        segment = Placement.REPLICATE.segment(layout, rank % world)
        assert (segment.start, segment.stop, segment.numel) == (0, layout.numel, layout.numel)
        assert segment.class_ranges() == tuple(c for c in layout.classes if c[1] < c[2])
        assert segment.intervals() == layout.intervals(0, layout.numel)
        shards = [segment.shard_of(torch.arange(layout.numel), other) for other in range(world)]
        assert torch.equal(torch.cat(shards), torch.arange(layout.numel))


def test_layout_by_hand() -> None:
    specs = [
        ParamSpec("bias", (10,), REDUCED, 1),
        ParamSpec("w", (30, 40), REDUCED, 0),
        ParamSpec("v", (7, 7), REDUCED, 0),
        ParamSpec("norm", (10,), torch.float32, 1),
    ]
    reduced, fp32 = flat_layouts("blocks.0", specs, 4)
    assert [(slot.spec.name, slot.start, slot.stop) for slot in reduced.slots] == [
        ("w", 0, 1200),
        ("v", 1216, 1265),  # aligned to 64
        ("bias", 2048, 2058),  # a new class starts on a chunk
    ]
    assert reduced.classes == ((0, 0, 2048), (1, 2048, 3072))
    assert (reduced.real_numel, reduced.shard_numel, reduced.numel) == (3072, 1024, 4096)
    assert (reduced.name, fp32.name) == ("blocks.0/bfloat16", "blocks.0/float32")
    assert (fp32.real_numel, fp32.numel) == (1024, 4096)
    assert [(i.spec.name, i.start, i.stop, i.offset) for i in reduced.intervals(1100, 1230)] == [
        ("w", 1100, 1200, 0),
        ("v", 0, 14, 116),
    ]
    assert ArenaSegment(reduced, 1024, 3072).class_ranges() == ((0, 0, 1024), (1, 1024, 2048))
    assert flat_layouts("", specs[-1:], 1)[0].name == "root/float32"


def test_an_inconsistent_layout_is_refused() -> None:
    spec = ParamSpec("w", (100,), REDUCED, 0)
    chunk = ((True, 0, CHUNK),)
    for starts, classes, message in (
        ([3], chunk, "slot 'w' starts at 3"),
        ([0, 64], chunk, "slot 'w' starts at 64"),
        ([0], ((True, 0, 100),), "do not cover whole chunks"),
        ([CHUNK], chunk, "do not cover whole chunks"),
    ):
        with pytest.raises(ValueError, match=message):
            FlatLayout("g", REDUCED, tuple(ParameterSlot(spec, start) for start in starts), classes, 1)


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 6, 16, 128])
def test_replicas_have_equal_parts_of_a_shard(num_replicas: int) -> None:
    """Padding alone depends on the replicas; a power of two adds none."""
    specs = [ParamSpec("w", (3000,), torch.float32), ParamSpec("b", (70,), torch.float32)]
    (plain,), (layout,) = flat_layouts("g", specs, 2), flat_layouts("g", specs, 2, num_replicas)
    assert layout.extents == plain.extents
    assert layout.shard_numel % num_replicas == 0
    assert layout.shard_numel >= plain.shard_numel
    if num_replicas & (num_replicas - 1) == 0:
        assert layout.shard_numel == plain.shard_numel


R, S = Placement.REPLICATE, Placement.SHARD


def test_the_table_is_that_of_the_design() -> None:
    rows = {stage: (row.compute, row.gradient, row.master) for stage, row in STAGES.items()}
    assert rows == {0: (R, R, R), 1: (R, R, S), 2: (R, S, S), 3: (S, S, S)}


# 7.5 billion parameters on 64 ranks, the example of the ZeRO paper (figure 1), here with FP32 main grads: 18 bytes a
# parameter unsharded (2 + 4 + 4 + 8). In units of 10^9 bytes.
ZERO = {"numel": 7.5, "state_bytes": 60.0, "replica_bytes": 15.0, "fp32_numel": 0.0, "frozen_bytes": 6.4}
# FP32 replicas count four bytes less the masters
FP32 = {"numel": 1010, "state_bytes": 8080, "replica_bytes": 2000, "fp32_numel": 10, "frozen_bytes": 0}
# 100 parameters in BF16, 1,000 in FP8 twice, 10 in FP32; 6 bytes of optimizer states for each
THREE_DTYPES = {"numel": 1110, "state_bytes": 6660, "replica_bytes": 2200, "fp32_numel": 10, "frozen_bytes": 8}
# a share is rounded up
ONE = {"numel": 1, "state_bytes": 8, "replica_bytes": 0, "fp32_numel": 1, "frozen_bytes": 5}


@pytest.mark.parametrize(
    ("sizes", "ranks", "stage", "want"),
    [
        (ZERO, 64, 0, (15.0, 30.0, 30.0, 60.0, 6.4)),
        (ZERO, 64, 1, (15.0, 30.0, 0.46875, 0.9375, 6.4)),
        (ZERO, 64, 2, (15.0, 0.46875, 0.46875, 0.9375, 6.4)),
        (ZERO, 64, 3, (0.234375, 0.46875, 0.46875, 0.9375, 0.1)),
        (FP32, 2, 0, (2000, 4040, 4040, 8080, 0)),
        (FP32, 2, 1, (2020, 4040, 2020, 4040, 0)),
        (FP32, 2, 2, (2020, 2020, 2020, 4040, 0)),
        (FP32, 2, 3, (1000, 2020, 2020, 4040, 0)),
        (FP32, 1, 2, (2000, 4040, 4040, 8080, 0)),
        (THREE_DTYPES, 4, 2, (2 * 100 + 2 * 1000 + 4 * 10 - 10, 1110, 1110, 1665, 8)),
        (THREE_DTYPES, 4, 3, (550, 1110, 1110, 1665, 2)),
        (ONE, 3, 2, (4 - 2, 2, 2, 3, 5)),
        (ONE, 3, 3, (0, 2, 2, 3, 2)),
    ],
)
def test_memory_formula_by_hand(sizes: dict[str, float], ranks: int, stage: int, want: tuple[float, ...]) -> None:
    unit = 1e9 if sizes is ZERO else 1
    got = memory_formula(STAGES[stage], **{name: round(size * unit) for name, size in sizes.items()}, num_ranks=ranks)
    kinds = ("compute", "main_grad", "master", "moments", "frozen")
    assert got == {kind: round(size * unit) for kind, size in zip(kinds, want, strict=True)}
