"""When a rank waits for its collectives, if they take time: in a plan, and in a step that is replayed."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtrain.planning.record.ranks import REPLICATE, SHARD, Transfer
from dtrain.planning.time.measured import _Clock
from dtrain.planning.time.replay import RankTrace, replay

GATHER = Transfer("all_gather", 10, 8, "blocks.0/bfloat16", SHARD)
ACROSS = Transfer("all_gather", 10, 8, "blocks.0/bfloat16 across replicas", REPLICATE)


def trace(*moments: tuple[float, int, bool], transfers: dict[int, Transfer] | None = None) -> RankTrace:
    """Returns a step of 100 seconds; each transfer without a description takes 10."""
    return RankTrace(100.0, moments, transfers or {number: GATHER for _, number, _ in moments})


def as_many_seconds(transfer: Transfer) -> float:
    return float(transfer.nbytes)


@pytest.mark.parametrize(
    ("moments", "waited"),
    [
        (((0.0, 0, False), (0.0, 0, True)), 10.0),
        (((0.0, 0, False), (4.0, 0, True)), 6.0),
        (((0.0, 0, False), (30.0, 0, True)), 0.0),
        # the second begins when the first has ended
        (((0.0, 0, False), (0.0, 1, False), (15.0, 0, True), (15.0, 1, True)), 5.0),
        # the first wait delays what comes after it, in which the second transfer goes on
        (((0.0, 0, False), (0.0, 0, True), (1.0, 1, False), (4.0, 1, True)), 17.0),
        (((0.0, 0, False),), 0.0),
    ],
)
def test_transfers_run_one_after_the_other_while_the_rank_computes(
    moments: tuple[tuple[float, int, bool], ...], waited: float
) -> None:
    found = replay(trace(*moments), as_many_seconds, overlaps=True)
    assert found.total().exposed == found.seconds - found.compute == waited


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5), st.integers(0, 20)), min_size=1, max_size=20),
    st.booleans(),
    st.floats(1, 2),
    st.floats(0, 1),
)
def test_waits_are_part_of_the_transfers_and_a_faster_network_is_never_slower(
    steps: list[tuple[float, float, int]], overlaps: bool, slowdown: float, factor: float
) -> None:
    moments: list[tuple[float, int, bool]] = []
    transfers, now = {}, 0.0
    for number, (before, between, nbytes) in enumerate(steps):
        transfers[number] = Transfer("all_gather", nbytes, 2)
        moments += [(now + before, number, False), (now + before + between, number, True)]
        now += before + between
    of_trace = RankTrace(now, moments, transfers)
    plain = replay(of_trace, as_many_seconds, overlaps=overlaps)
    total = sum(nbytes for _, _, nbytes in steps)
    assert plain.seconds == pytest.approx(plain.compute + plain.total().exposed)
    assert 0 <= plain.total().exposed <= total + 1e-9
    assert overlaps or plain.total().exposed == pytest.approx(total)
    slow = replay(of_trace, as_many_seconds, overlaps=overlaps, slowdown=slowdown)
    fast = replay(of_trace, lambda transfer: factor * transfer.nbytes, overlaps=overlaps, slowdown=slowdown)
    assert slow.compute - 1e-9 <= fast.seconds <= slow.seconds + 1e-9
    assert slow.seconds == pytest.approx(slow.compute + slow.slowed + slow.total().exposed)


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


def test_a_clock_leaves_out_the_work_of_others() -> None:
    clock = _Clock(torch.device("cpu"))
    with clock.absent():
        time.sleep(0.1)
    assert 0 <= clock.seconds() < 0.1
