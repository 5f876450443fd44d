"""The table of stages, and the ZeRO formula against numbers computed by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dtrain
from dtrain.sharding.placement import STAGES, Placement, memory_formula
from tests.helpers.zoo import make

R, S = Placement.REPLICATE, Placement.SHARD


def test_the_table_is_that_of_the_design() -> None:
    rows = {stage: (row.compute, row.gradient, row.master) for stage, row in STAGES.items()}
    assert rows == {0: (R, R, R), 1: (R, R, S), 2: (R, S, S), 3: (S, S, S)}


# 7.5 billion parameters on 64 ranks, the example of the ZeRO paper (figure 1), here with FP32 main grads: 18 bytes a
# parameter unsharded (2 + 4 + 4 + 8). In units of 10^9 bytes.
@pytest.mark.parametrize(
    ("stage", "compute", "main_grad", "master", "moments"),
    [
        (0, 15.0, 30.0, 30.0, 60.0),
        (1, 15.0, 30.0, 0.46875, 0.9375),
        (2, 15.0, 0.46875, 0.46875, 0.9375),
        (3, 0.234375, 0.46875, 0.46875, 0.9375),
    ],
)
def test_memory_formula_by_hand(stage: int, compute: float, main_grad: float, master: float, moments: float) -> None:
    got = memory_formula(
        STAGES[stage], reduced_numel=7_500_000_000, fp32_numel=0, reduced_bytes=2, state_bytes=8, world_size=64
    )
    want = {"compute": compute, "main_grad": main_grad, "master": master, "moments": moments}
    assert got == {kind: gigabytes * 1e9 for kind, gigabytes in want.items()}


@pytest.mark.parametrize(
    ("stage", "world_size", "compute"), [(0, 2, 2000), (1, 2, 2040), (2, 2, 2040), (3, 2, 1000), (2, 1, 2000)]
)
def test_fp32_replicas_count_four_bytes_unless_they_are_the_masters(stage: int, world_size: int, compute: int) -> None:
    got = memory_formula(
        STAGES[stage], reduced_numel=1000, fp32_numel=10, reduced_bytes=2, state_bytes=8, world_size=world_size
    )
    assert got["compute"] == compute
    assert got["master"] == 4040 // (1 if stage == 0 else world_size)


@pytest.mark.parametrize(("stage", "compute"), [(2, 100 * 2 + 10 * 4 + 1000 * 2), (3, 550)])
def test_fp8_weights_count_a_byte_a_copy(stage: int, compute: int) -> None:
    got = memory_formula(
        STAGES[stage],
        reduced_numel=100,
        fp32_numel=10,
        reduced_bytes=2,
        state_bytes=6,
        world_size=4,
        float8_numel=1000,
        float8_copies=2,
    )
    assert got == {"compute": compute, "main_grad": 1110, "master": 1110, "moments": 1665}


def test_a_share_is_rounded_up() -> None:
    got = memory_formula(STAGES[2], reduced_numel=0, fp32_numel=1, reduced_bytes=4, state_bytes=8, world_size=3)
    assert got == {"compute": 4, "main_grad": 2, "master": 2, "moments": 3}


@given(st.sampled_from(sorted(STAGES)), st.integers(0, 10**10), st.integers(0, 10**8), st.integers(1, 1024))
def test_shards_add_up_and_more_sharding_never_costs(stage: int, reduced: int, fp32: int, world: int) -> None:
    arguments = {"reduced_numel": reduced, "fp32_numel": fp32, "reduced_bytes": 2, "state_bytes": 8}
    single = memory_formula(STAGES[stage], **arguments, world_size=1)
    sharded = memory_formula(STAGES[stage], **arguments, world_size=world)
    assert sum(single.values()) == 18 * reduced + 16 * fp32
    replicated_fp32 = 4 * fp32 if stage in (1, 2) and world > 1 else 0  # the masters are sharded, so these are separate
    for kind, total in single.items():
        total += replicated_fp32 if kind == "compute" else 0
        assert sharded[kind] == total or 0 <= sharded[kind] * world - total < world
    if stage:
        less = memory_formula(STAGES[stage - 1], **arguments, world_size=world)
        assert all(sharded[kind] <= less[kind] for kind in ("main_grad", "master", "moments"))
        assert sum(sharded.values()) <= sum(less.values())


@pytest.mark.parametrize("stage", sorted(STAGES))
def test_the_formula_is_what_the_tensors_hold_up_to_padding(stage: int) -> None:
    engine = dtrain.initialize(make("transformer").build(0), precision="bf16", zero_stage=stage, seed=0)
    held, formula = engine.memory(), engine.memory_formula()
    layouts = engine.state.layouts  # type: ignore[attr-defined]
    padding = sum(layout.numel for layout in layouts) - engine.num_parameters
    per_element = {"compute": 2, "main_grad": 4, "master": 4, "moments": 8}
    for kind, size in per_element.items():
        assert formula[kind] <= held[kind] <= formula[kind] + padding * size
    assert held["master"] == formula["master"] + 4 * padding
    assert held["buffers"] == 0
