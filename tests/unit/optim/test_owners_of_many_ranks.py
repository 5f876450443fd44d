"""The plan of the owners of all matrices, which each rank computes."""

from __future__ import annotations

import tracemalloc

from dtrain.optim.owners import MatrixInterval, MatrixPlan, assign_owners, matrices_of


def _peak_bytes(ranks: int) -> int:
    """Returns the memory of a plan in which each rank holds an equal part of one matrix."""
    (matrix,) = matrices_of("weight", [ranks, 4])
    held = [[MatrixInterval(matrix, 4 * rank, 4 * rank + 4)] for rank in range(ranks)]
    owners = assign_owners([matrix], lambda shape: float(shape[0]), ranks)
    tracemalloc.start()
    plan = MatrixPlan(held, owners, 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert plan.total == 4 * (ranks - 1)
    return peak


def test_memory_does_not_grow_with_the_square_of_the_ranks() -> None:
    assert _peak_bytes(1024) < 6 * _peak_bytes(256)
