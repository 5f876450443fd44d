"""``offload=cpu`` on two ranks: equal bits where the device is the host, and beside a device with its own memory."""

from __future__ import annotations

import pytest

from tests.helpers.apart import is_equal, make, train
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes


def _train_stages(rank: int, world: int) -> list[str]:
    """Returns the stages whose bits differ, or whose states lie elsewhere than expected."""
    wrong = []
    for stage in (1, 2, 3):
        plain, here = (
            make(is_offloaded=False, zero_stage=stage),
            make(is_offloaded=False, zero_stage=stage, offload="cpu"),
        )
        # one micro-batch: of several, each one's gradients are summed over the ranks before they leave the device
        apart = make(is_offloaded=True, zero_stage=stage)
        outcomes = [train(engine, 2, weights=[1.0 + rank], seed=rank) for engine in (plain, here, apart)]
        is_alike = outcomes[0] == outcomes[1] == outcomes[2] and is_equal(plain, here) and is_equal(plain, apart)
        if not is_alike or here.host_kinds or not apart.host_kinds or here.memory() != plain.memory():
            wrong.append(f"stage {stage} on rank {rank}")
    return wrong


def test_two_ranks_train_the_same_bits() -> None:
    assert not any(run_ranks(2, _train_stages))
