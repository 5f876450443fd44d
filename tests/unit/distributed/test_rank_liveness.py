"""Ranks whose processes have ended are named."""

from __future__ import annotations

import pytest
import torch

from dtrain.distributed.rank_liveness import RankLiveness
from dtrain.distributed.transport.single_rank import SingleRank
from dtrain.errors import CommunicationError


def test_one_and_several_ranks_of_another_host_have_ended() -> None:
    comm = SingleRank(torch.device("cpu"))
    liveness = RankLiveness(comm)
    liveness._host_names = dict.fromkeys((4, 5), "host1")
    for rank, expected in ((4, "rank 4 on host1 has ended, so"), (5, "ranks 4-5 on host1 have ended, so")):
        comm.schedule.ended_ranks.add(rank)
        with pytest.raises(CommunicationError, match=f"^{expected}"), liveness.name_ended_rank():
            raise CommunicationError("reduce failed")
