"""A step whose transfers take time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.planning.replay import replay
from dtrain.planning.timeline import REPLICATE, SHARD, Moment, RankTrace, Transfer, communicate

GATHER = Transfer("all_gather", 10, 8, "blocks.0/bfloat16", SHARD)
ACROSS = Transfer("all_gather", 10, 8, "blocks.0/bfloat16 across replicas", REPLICATE)


def trace(*moments: tuple[float, int, bool], transfers: dict[int, Transfer], seconds: float = 100.0) -> RankTrace:
    return RankTrace(seconds, [Moment(*moment) for moment in moments], transfers)


def as_many_seconds(transfer: Transfer) -> float:
    return float(transfer.nbytes)


def test_axes_do_not_delay_each_other_and_one_axis_is_a_queue() -> None:
    moments = ((0.0, 0, False), (0.0, 1, False), (0.0, 0, True), (0.0, 1, True))
    one = replay(trace(*moments, transfers={0: GATHER, 1: GATHER}), as_many_seconds, overlaps=True)
    two = replay(trace(*moments, transfers={0: GATHER, 1: ACROSS}), as_many_seconds, overlaps=True)
    assert (one.seconds, two.seconds) == (120.0, 110.0)
    assert one.shares["weights", SHARD].exposed == 20.0
    assert two.shares["weights", SHARD].exposed == 10.0
    assert two.shares["across replicas", REPLICATE].exposed == 0.0
    assert two.waits == {GATHER.label: 10.0, ACROSS.label: 0.0}


def test_computation_is_slower_beside_a_transfer() -> None:
    moments = ((20.0, 0, False), (60.0, 0, True))
    found = replay(trace(*moments, transfers={0: GATHER}), as_many_seconds, overlaps=True, slowdown=1.25)
    assert found.seconds == pytest.approx(102.0)  # 8 seconds of computation take the 10 of the transfer
    assert found.slowed == pytest.approx(2.0)
    slower = replay(trace(*moments, transfers={0: GATHER}), as_many_seconds, overlaps=True, compute_factor=2.0)
    assert (slower.compute, slower.seconds) == (200.0, 200.0)


MOMENTS = st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5), st.integers(0, 20)), min_size=1, max_size=20)


@given(MOMENTS, st.booleans(), st.floats(1, 2), st.floats(0, 1))
def test_a_faster_network_is_never_slower(
    steps: list[tuple[float, float, int]], overlaps: bool, slowdown: float, factor: float
) -> None:
    moments, transfers, now = [], {}, 0.0
    for number, (before, between, nbytes) in enumerate(steps):
        transfers[number] = Transfer("all_gather", nbytes, 2)
        moments += [Moment(now + before, number, False), Moment(now + before + between, number, True)]
        now += before + between
    of_trace = RankTrace(now, moments, transfers)
    slow = replay(of_trace, as_many_seconds, overlaps=overlaps, slowdown=slowdown)
    fast = replay(of_trace, lambda transfer: factor * transfer.nbytes, overlaps=overlaps, slowdown=slowdown)
    assert slow.compute <= fast.seconds + 1e-9
    assert fast.seconds <= slow.seconds + 1e-9
    assert slow.seconds == pytest.approx(slow.compute + slow.slowed + slow.exposed)
    plain = communicate(of_trace, as_many_seconds, overlaps=overlaps)
    assert replay(of_trace, as_many_seconds, overlaps=overlaps).exposed == pytest.approx(plain.waited)
