"""When a rank waits for its collectives, if they take time."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtrain.planning.timeline import Communication, Moment, RankTrace, Timeline, Transfer, communicate

TEN = Transfer("all_gather", 10, 2)


def trace(*moments: tuple[float, int, bool], seconds: float = 100.0) -> RankTrace:
    found = [Moment(*moment) for moment in moments]
    return RankTrace(seconds, found, {moment.transfer: TEN for moment in found})


def ten_seconds(transfer: Transfer) -> float:
    return float(transfer.nbytes)


@pytest.mark.parametrize(
    ("moments", "expected"),
    [
        (((0.0, 0, False), (0.0, 0, True)), Communication(10.0, 0.0)),
        (((0.0, 0, False), (4.0, 0, True)), Communication(6.0, 4.0)),
        (((0.0, 0, False), (30.0, 0, True)), Communication(0.0, 10.0)),
        # the second begins when the first has ended
        (((0.0, 0, False), (0.0, 1, False), (15.0, 0, True), (15.0, 1, True)), Communication(5.0, 15.0)),
        # the first wait delays what comes after it, in which the second transfer goes on
        (((0.0, 0, False), (0.0, 0, True), (1.0, 1, False), (4.0, 1, True)), Communication(17.0, 3.0)),
        (((0.0, 0, False),), Communication(0.0, 10.0)),
    ],
)
def test_transfers_run_one_after_the_other_while_the_rank_computes(
    moments: tuple[tuple[float, int, bool], ...], expected: Communication
) -> None:
    assert communicate(trace(*moments), ten_seconds, overlaps=True) == expected


def test_a_rank_that_moves_the_bytes_itself_hides_nothing() -> None:
    moments = ((0.0, 0, False), (0.0, 1, False), (50.0, 0, True), (60.0, 1, True))
    assert communicate(trace(*moments), ten_seconds, overlaps=False) == Communication(20.0, 0.0)


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5), st.integers(0, 20)), min_size=1, max_size=20), st.booleans()
)
def test_waits_are_never_longer_than_the_transfers(steps: list[tuple[float, float, int]], overlaps: bool) -> None:
    moments, transfers, now = [], {}, 0.0
    for number, (before, between, nbytes) in enumerate(steps):
        transfers[number] = Transfer("all_gather", nbytes, 2)
        moments += [Moment(now + before, number, False), Moment(now + before + between, number, True)]
        now += before + between
    found = communicate(RankTrace(now, moments, transfers), ten_seconds, overlaps=overlaps)
    total = sum(nbytes for _, _, nbytes in steps)
    assert found.waited + found.hidden == pytest.approx(total)
    assert 0 <= found.waited <= total + 1e-9
    assert overlaps or found.waited == total


def test_a_timeline_keeps_moments_without_the_work_of_others() -> None:
    timeline = Timeline(torch.device("cpu"))
    before = timeline.start(TEN)
    timeline.restart()
    timeline.wait(before)  # started earlier: not counted
    number = timeline.start(TEN)
    with timeline.absent():
        time.sleep(0.2)
    timeline.wait(number)
    found = timeline.trace()
    assert [(moment.transfer, moment.is_wait) for moment in found.moments] == [(number, False), (number, True)]
    assert found.transfers == {number: TEN}
    assert 0 <= found.moments[0].seconds <= found.moments[1].seconds <= found.seconds < 0.2
