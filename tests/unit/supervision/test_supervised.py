"""The start of the watchers, which all ranks take part in."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dtrain.distributed.setup import make_communicator
from dtrain.supervision import supervised
from tests.helpers.ranks import run_ranks

LIMITS_S = (60.0, 60.0, 60.0)


def is_watched(rank: int, world: int, num_hosts: int) -> bool:
    supervised.host_identity = lambda: [str(rank % num_hosts)]  # type: ignore[assignment]
    comm = make_communicator(dist.group.WORLD, torch.device("cpu"), shared_memory=False)
    with supervised.supervised(comm, LIMITS_S, enabled=rank == 0) as supervision:
        assert comm.exchange_text(str(rank)) == [str(rank) for rank in range(world)]
        return supervision.watcher is not None


@pytest.mark.processes
@pytest.mark.parametrize("num_hosts", [1, 2])
def test_ranks_may_differ_in_whether_they_are_watched(num_hosts: int) -> None:
    assert run_ranks(2, is_watched, num_hosts, timeout=60) == [True, False]
