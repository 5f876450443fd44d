"""The message that names the ranks whose processes have ended."""

from __future__ import annotations

import pytest
import torch

from dtrain.distributed.rank_liveness import RankLiveness
from dtrain.distributed.single_rank import SingleRank
from dtrain.errors import CommunicationError


@pytest.mark.parametrize(
    ("ranks", "expected"), [((4,), "rank 4 on host1 has ended, so"), ((4, 5), "ranks 4-5 on host1 have ended, so")]
)
def test_one_and_several_ranks_of_another_host(ranks: tuple[int, ...], expected: str) -> None:
    comm = SingleRank(torch.device("cpu"))
    liveness = RankLiveness(comm)
    liveness._host_names = dict.fromkeys(ranks, "host1")
    comm.schedule.ended_ranks.update(ranks)
    with pytest.raises(CommunicationError, match=f"^{expected}"), liveness.name_ended_rank():
        raise CommunicationError("reduce failed")
