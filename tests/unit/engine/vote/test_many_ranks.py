"""The vote of 1,024 ranks, none of which is started: its bytes, and what it costs a rank's host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from dtrain.engine.vote.divergence import texts_of
from dtrain.engine.vote.record import NUM_FIELDS, DeviceRecord, HostRecord
from dtrain.planning.timeline import Timeline
from tests.helpers.many_ranks import Texts, planned_run, seconds, vote_host_work, vote_rows

RANKS = 1024
_TINY = ("model=tiny", "model.vocab_size=64", "precision=bf16")


def test_a_step_gathers_one_row_of_each_rank() -> None:
    timeline = Timeline(torch.device("cpu"))
    ranks = 64
    with planned_run(ranks, model=_TINY).engine(timeline=timeline) as (engine, batch):
        for _ in range(2):
            timeline.restart()
            for micro in engine.accumulate([batch]):
                engine.backward(engine(**micro))
            engine.step()
        transfers = timeline.trace().transfers.values()
    received = [transfer.nbytes for transfer in transfers if transfer.op == "gather_rows"]
    assert received == [(ranks - 1) * NUM_FIELDS * 8]


@pytest.mark.parametrize("kind", [HostRecord, DeviceRecord])
def test_the_host_makes_no_object_for_each_rank(kind: type[Any]) -> None:
    made: list[Sequence[int]] = []
    original = kind.from_row.__func__

    def from_row(cls: type[Any], row: Sequence[int]) -> Any:
        made.append(row)
        return original(cls, row)

    run = vote_host_work(vote_rows(RANKS))
    with mock.patch.object(kind, "from_row", classmethod(from_row)):
        run()
    assert len(made) < 8


def test_the_host_decides_in_less_than_a_hundredth_of_a_second() -> None:
    few, many = (vote_host_work(vote_rows(ranks)) for ranks in (RANKS // 16, RANKS))
    few(), many()  # the first calls import and allocate
    taken = seconds(many, 25)
    assert taken < 0.01, "1 % of a step of one second"
    assert taken < 3 * seconds(few, 25), "most of it does not depend on the number of ranks"


@pytest.mark.parametrize(("rank", "sent"), [(0, "{}"), (5, ""), (7, "{}")])
def test_only_two_ranks_send_what_differs(rank: int, sent: str) -> None:
    comm = Texts(RANKS)
    comm.rank = rank
    assert texts_of(comm, "{}", 7) == (sent, sent)
