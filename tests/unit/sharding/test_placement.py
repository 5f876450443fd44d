"""The table of stages, and the ZeRO formula against numbers computed by hand."""

from __future__ import annotations

import pytest

from dtrain.sharding.placement import STAGES, Placement, memory_formula

R, S = Placement.REPLICATE, Placement.SHARD


def test_the_table_is_that_of_the_design() -> None:
    rows = {stage: (row.compute, row.gradient, row.master) for stage, row in STAGES.items()}
    assert rows == {0: (R, R, R), 1: (R, R, S), 2: (R, S, S), 3: (S, S, S)}


Sizes = dict[str, float]
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
    ("sizes", "ranks", "stage", "compute", "main_grad", "master", "moments", "frozen"),
    [
        (ZERO, 64, 0, 15.0, 30.0, 30.0, 60.0, 6.4),
        (ZERO, 64, 1, 15.0, 30.0, 0.46875, 0.9375, 6.4),
        (ZERO, 64, 2, 15.0, 0.46875, 0.46875, 0.9375, 6.4),
        (ZERO, 64, 3, 0.234375, 0.46875, 0.46875, 0.9375, 0.1),
        (FP32, 2, 0, 2000, 4040, 4040, 8080, 0),
        (FP32, 2, 1, 2020, 4040, 2020, 4040, 0),
        (FP32, 2, 2, 2020, 2020, 2020, 4040, 0),
        (FP32, 2, 3, 1000, 2020, 2020, 4040, 0),
        (FP32, 1, 2, 2000, 4040, 4040, 8080, 0),
        (THREE_DTYPES, 4, 2, 2 * 100 + 2 * 1000 + 4 * 10 - 10, 1110, 1110, 1665, 8),
        (THREE_DTYPES, 4, 3, 550, 1110, 1110, 1665, 2),
        (ONE, 3, 2, 4 - 2, 2, 2, 3, 5),
        (ONE, 3, 3, 0, 2, 2, 3, 2),
    ],
)
def test_memory_formula_by_hand(
    sizes: Sizes, ranks: int, stage: int, compute: float, main_grad: float, master: float, moments: float, frozen: float
) -> None:
    unit = 1e9 if sizes is ZERO else 1
    got = memory_formula(STAGES[stage], **{name: round(size * unit) for name, size in sizes.items()}, num_ranks=ranks)
    want = {"compute": compute, "main_grad": main_grad, "master": master, "moments": moments, "frozen": frozen}
    assert got == {kind: round(size * unit) for kind, size in want.items()}
