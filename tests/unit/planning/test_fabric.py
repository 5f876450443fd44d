"""Seconds of collectives on networks that are not here."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.errors import ConfigError
from dtrain.planning.fabric import FABRICS, find_fabric
from dtrain.planning.timeline import REPLICATE, Transfer

IB = FABRICS["ib-400g"]
OPS = st.sampled_from(("all_gather", "reduce_scatter_sum", "all_to_all_single", "gather_rows", "all_reduce_max"))
SIZES = st.sampled_from((2, 8, 16, 64, 1024, 4096))
ACROSS = st.sampled_from([name for name, fabric in FABRICS.items() if fabric.nic is not None])


@pytest.mark.parametrize(
    ("transfer", "expected"),
    [
        # one node: 7 steps over NVLink
        (Transfer("all_gather", 7 * 2**28, 8), 8.4e-6 + 7 * 6e-6 + 7 * 2**28 / 360e9),
        # 8 nodes: 56 steps inside, 7 between; eight NICs carry more than NVLink
        (Transfer("all_gather", 63 * 2**25, 64), 8.4e-6 + 56 * 6e-6 + 7 * 14e-6 + 63 * 2**25 / 360e9),
        # each rank sends 56 of 63 parts through its own NIC
        (Transfer("all_to_all_single", 63 * 2**25, 64), 8.4e-6 + 63 * 3.4e-6 + 56 * 2**25 / 47e9),
        # a rank of each of 16 nodes: one NIC
        (Transfer("all_gather", 15 * 2**24, 16, "", REPLICATE, 64), 8.4e-6 + 15 * 14e-6 + 15 * 2**24 / 47e9),
        # two ranks on each of 4 nodes
        (Transfer("all_gather", 7 * 2**26, 8, "", REPLICATE, 4), 8.4e-6 + 4 * 6e-6 + 3 * 14e-6 + 7 * 2**26 / 94e9),
        # a few bytes: the protocol of least latency
        (Transfer("gather_rows", 63 * 176, 64), 6.6e-6 + 56 * 2e-6 + 7 * 2.7e-6 + 63 * 176 / 20e9),
    ],
)
def test_formulas(transfer: Transfer, expected: float) -> None:
    assert IB.seconds(transfer) == pytest.approx(expected, rel=1e-9)


@given(OPS, SIZES, st.integers(0, 2**32), ACROSS, st.floats(1, 10), st.sampled_from((1, 2, 8, 64)))
def test_more_bandwidth_is_never_slower(op: str, size: int, nbytes: int, name: str, factor: float, stride: int) -> None:
    fabric = FABRICS[name]
    transfer = Transfer(op, nbytes, size, stride=stride)
    assert fabric.nic is not None
    before = fabric.seconds(transfer)
    assert before > 0
    for faster in (
        replace(fabric, nic=factor * fabric.nic),
        replace(fabric, inside=factor * fabric.inside),
        replace(fabric, hop=fabric.hop / factor, node_hop=fabric.node_hop / factor, pair=fabric.pair / factor),
    ):
        assert faster.seconds(transfer) <= before * (1 + 1e-12)
    assert fabric.seconds(replace(transfer, nbytes=nbytes + 1)) >= before
    assert fabric.seconds(replace(transfer, world_size=1)) == 0


def test_measured_collectives_are_within_a_third() -> None:
    """Compares bus GB/s of all-gather and all-to-all with AWS p5: 32 and 256 H100s, 8 a node (docs/scaling.md)."""
    measured = {
        ("all_gather", 32, 2048): 330.9,
        ("all_gather", 256, 512): 146.4,
        ("all_gather", 256, 2048): 262.8,
        ("all_to_all_single", 32, 2048): 54.1,
        ("all_to_all_single", 256, 512): 33.1,
        ("all_to_all_single", 256, 2048): 40.8,
    }
    for (op, size, mib), gigabytes_s in measured.items():
        received = mib * 2**20 * (size - 1) // size
        found = received / FABRICS["efa"].seconds(Transfer(op, received, size)) / 1e9
        assert found == pytest.approx(gigabytes_s, rel=0.33), (op, size, mib)


def test_a_network_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="network=nvlink is one node of 8 ranks, and 16 ranks communicate"):
        FABRICS["nvlink"].seconds(Transfer("all_gather", 1, 16))
    with pytest.raises(ConfigError, match="network=ib-40g is neither a file nor a known network; did you mean"):
        find_fabric("ib-40g")
