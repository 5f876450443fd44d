from __future__ import annotations

import json
import os
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.errors import ConfigError
from dtrain.planning.devices import find_device
from dtrain.planning.record.ranks import HOST, NCCL, REPLICATE, SOCKETS, Transfer
from dtrain.planning.time.network import FABRICS, Link, Network
from dtrain.planning.time.prediction import Assumptions
from dtrain.precision.hardware import GPUS, Variant
from tests.helpers.launch import ROOT
from tests.unit.planning.planned_runs import planned_run

MEASURED = ROOT / "docs" / "results" / "collectives-cpu.json"
IB = FABRICS["ib-400g"]


@pytest.mark.parametrize("variant", [one for gpu in GPUS for one in gpu.variants.values() if one], ids=itemgetter(0))
def test_every_listed_gpu_has_published_rates(variant: Variant) -> None:
    device = find_device(variant.name)
    gigabytes = int(device.name.rsplit("-", 1)[1].removesuffix("gb"))
    assert 0.9 < device.memory / (gigabytes * 1e9) < 1.08
    assert device.rate("fp16")


def test_the_ranks_of_a_host_share_its_memory() -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert find_device("cpu").memory == memory
    assert find_device("cpu", 4).memory == memory // 4


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


@given(st.floats(1e-6, 1e-2), st.floats(1e-12, 1e-8), st.integers(2, 64))
def test_the_fit_finds_latency_and_bandwidth(latency: float, per_byte: float, ranks: int) -> None:
    sizes = (2**14, 2**20, 2**24)
    link = Link.fit([(size, latency + per_byte * size) for size in sizes], ranks)
    for size in sizes:
        assert link.seconds(Transfer("all_gather", size, ranks)) == pytest.approx(latency + per_byte * size, rel=1e-3)
    assert link.latency == pytest.approx(latency, rel=1e-2, abs=1e-3 * per_byte * sizes[0])


@pytest.mark.parametrize("points", [[(1000, 1e-3), (2000, 3e-3)], [(1000, 3e-3), (2000, 1e-3)], [(1000, 1e-3)] * 2])
def test_no_part_of_a_link_is_negative(points: list[tuple[int, float]]) -> None:
    link = Link.fit(points, 2)
    assert link.latency >= 0
    assert link.per_byte >= 0
    assert link.seconds(Transfer("all_gather", 1500, 2)) == pytest.approx(1.5e-3, rel=0.6)


def test_results_of_the_benchmark_are_read_and_latency_grows_with_the_ranks() -> None:
    assert Link(1e-4, 0.0, 2).seconds(Transfer("all_gather", 0, 9)) == pytest.approx(8e-4)
    sockets, shared = (Network.read(MEASURED, transport) for transport in (SOCKETS, HOST))
    transfer = Transfer("all_gather", 2**22, 2)
    assert sockets.num_ranks == 2
    assert sockets.seconds(transfer) > shared.seconds(transfer) > 0
    assert sockets.seconds(Transfer("reduce_scatter_sum", 2**22, 2)) != sockets.seconds(transfer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda results: results["timings"].clear(), "two sizes, by two ranks or more; run dtrain bench collectives"),
        (lambda results: results["config"]["bench"].update(ranks=1), "two sizes, by two ranks or more"),
        (lambda results: results.clear(), r"network\.json is no result of dtrain bench collectives bench\.out=FILE"),
    ],
)
def test_results_that_tell_too_little_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    results = json.loads(MEASURED.read_text())
    change(results)
    (tmp_path / "network.json").write_text(json.dumps(results))
    with pytest.raises(ConfigError, match=message):
        Network.read(tmp_path / "network.json", SOCKETS)


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="one node of 8 ranks, and 16 ranks"):
        FABRICS["nvlink"].seconds(Transfer("all_gather", 1, 16))
    with pytest.raises(ConfigError, match="network=ib-40g is neither a file nor a known network; did you mean"):
        Assumptions("ib-40g").links(planned_run(device="h100-80gb"))
    with pytest.raises(ConfigError, match="through nccl"):
        Network.read(MEASURED, NCCL)
