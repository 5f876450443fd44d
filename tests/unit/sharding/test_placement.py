"""The table of stages, and the ZeRO formula against numbers computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dtrain
from dtrain.precision.float8.cast import E4M3
from dtrain.sharding.placement import STAGES, Placement, memory_formula
from tests.helpers import float8_models, needs
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
        STAGES[stage],
        numel=7_500_000_000,
        state_bytes=8 * 7_500_000_000,
        replica_bytes=15_000_000_000,
        fp32_numel=0,
        frozen_bytes=64_000,
        num_ranks=64,
    )
    want = {"compute": compute, "main_grad": main_grad, "master": master, "moments": moments}
    frozen = {"frozen": 1_000 if stage == 3 else 64_000}
    assert got == {kind: gigabytes * 1e9 for kind, gigabytes in want.items()} | frozen


@pytest.mark.parametrize(
    ("stage", "num_ranks", "compute"), [(0, 2, 2000), (1, 2, 2020), (2, 2, 2020), (3, 2, 1000), (2, 1, 2000)]
)
def test_fp32_replicas_count_four_bytes_less_the_masters(stage: int, num_ranks: int, compute: int) -> None:
    got = memory_formula(
        STAGES[stage],
        numel=1010,
        state_bytes=8 * 1010,
        replica_bytes=2000,
        fp32_numel=10,
        frozen_bytes=0,
        num_ranks=num_ranks,
    )
    assert got["compute"] == compute
    assert got["master"] == 4040 // (1 if stage == 0 else num_ranks)


@pytest.mark.parametrize(("stage", "compute"), [(2, 2 * 100 + 2 * 1000 + 4 * 10 - 10), (3, 550)])
def test_by_hand_with_three_replica_dtypes(stage: int, compute: int) -> None:
    """100 parameters in BF16, 1,000 in FP8 twice, 10 in FP32; 6 bytes of optimizer states for each."""
    got = memory_formula(
        STAGES[stage],
        numel=1110,
        state_bytes=6 * 1110,
        replica_bytes=2 * 100 + 2 * 1000,
        fp32_numel=10,
        frozen_bytes=8,
        num_ranks=4,
    )
    frozen = 2 if stage == 3 else 8
    assert got == {"compute": compute, "main_grad": 1110, "master": 1110, "moments": 1665, "frozen": frozen}


@pytest.mark.parametrize(("stage", "compute", "frozen"), [(2, 4 - 2, 5), (3, 0, 2)])
def test_a_share_is_rounded_up(stage: int, compute: int, frozen: int) -> None:
    got = memory_formula(
        STAGES[stage], numel=1, state_bytes=8, replica_bytes=0, fp32_numel=1, frozen_bytes=5, num_ranks=3
    )
    assert got == {"compute": compute, "main_grad": 2, "master": 2, "moments": 3, "frozen": frozen}


@given(
    st.sampled_from(sorted(STAGES)),
    st.integers(0, 10**10),
    st.integers(0, 10**8),
    st.integers(0, 10**10),
    st.integers(1, 1024),
)
def test_shards_add_up_and_more_sharding_never_costs(
    stage: int, reduced: int, fp32: int, frozen: int, world: int
) -> None:
    arguments = {
        "numel": reduced + fp32,
        "state_bytes": 8 * (reduced + fp32),
        "replica_bytes": 2 * reduced,
        "fp32_numel": fp32,
        "frozen_bytes": frozen,
    }
    single = memory_formula(STAGES[stage], **arguments, num_ranks=1)
    sharded = memory_formula(STAGES[stage], **arguments, num_ranks=world)
    assert sum(single.values()) == 18 * reduced + 16 * fp32 + frozen
    # at stages 1 and 2 the FP32 replicas are whole, and a rank's masters are its part of them
    apart = 4 * fp32 - -(-4 * fp32 // world) if stage in (1, 2) else 0
    for kind, total in single.items():
        total += apart if kind == "compute" else 0
        assert sharded[kind] == total or 0 <= sharded[kind] * world - total < world
    if stage:
        less = memory_formula(STAGES[stage - 1], **arguments, num_ranks=world)
        assert all(sharded[kind] <= less[kind] for kind in ("main_grad", "master", "moments", "frozen"))
        assert sum(sharded.values()) <= sum(less.values())


@pytest.mark.parametrize("stage", sorted(STAGES))
@pytest.mark.parametrize(("recipe", "num_copies"), [("tensorwise", 1), ("rowwise", 2)])
def test_fp8_weights_count_a_byte_a_copy(recipe: str, num_copies: int, stage: int) -> None:
    needs.row_scales_on_cpu(rowwise=recipe == "rowwise")
    engine = float8_models.start(recipe, zero_stage=stage)
    weights = {name for name, dtype in engine.contract.replica_dtypes.items() if dtype == E4M3}
    assert weights
    float8, fp32, bf16 = (
        sum(math.prod(engine.shapes[name]) for name, dtype in engine.contract.replica_dtypes.items() if dtype == wanted)
        for wanted in (E4M3, torch.float32, torch.bfloat16)
    )
    assert float8 + fp32 + bf16 == engine.num_parameters
    assert engine.memory_formula()["compute"] == num_copies * float8 + 2 * bf16  # a single rank has all the masters


@pytest.mark.parametrize("stage", sorted(STAGES))
def test_the_formula_is_what_the_tensors_hold_up_to_padding(stage: int) -> None:
    engine = dtrain.initialize(make("transformer").build(0), precision="bf16", zero_stage=stage, seed=0)
    held, formula = engine.memory(), engine.memory_formula()
    layouts = engine.sharded.layouts  # type: ignore[attr-defined]
    padding = sum(layout.numel for layout in layouts) - engine.num_parameters
    per_element = {"compute": 2, "main_grad": 4, "master": 4, "moments": 8}
    for kind, size in per_element.items():
        assert formula[kind] <= held[kind] <= formula[kind] + padding * size
    assert held["master"] == formula["master"] + 4 * padding
    assert held["buffers"] == 0
