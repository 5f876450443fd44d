"""The engine of Llama 8B among 1,024 ranks, on fake tensors."""

from __future__ import annotations

import resource
import time

import pytest

from tests.helpers.many_ranks import planned_run, seconds
from tests.helpers.ranks import run_ranks


def build_and_step(rank: int, world: int) -> tuple[list[float], list[float], int]:
    """Returns seconds of building and of a step on 64 and on 1,024 ranks, and the resident set in KiB."""
    built, stepped = [], []
    for ranks in (64, 1024):
        start = time.process_time()
        with planned_run(ranks).engine() as (_, step):
            built.append(time.process_time() - start)
            step()
            stepped += seconds(step, rounds=3)
    return built, stepped, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.processes
@pytest.mark.exhaustive
def test_an_engine_of_1024_ranks_is_built_and_steps() -> None:
    (((_, build_s), (few_step_s, step_s), resident_kib),) = run_ranks(1, build_and_step, fresh=True)
    assert build_s < 60.0
    assert resident_kib < 4 * 2**20
    assert step_s < 2.5 * few_step_s, "the work of a step hardly depends on the number of ranks"
