"""Latency and bandwidth of collectives, from the results of ``dtrain bench collectives``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.errors import ConfigError
from dtrain.planning.network import Link, Network
from dtrain.planning.ranks import HOST, NCCL, SOCKETS
from dtrain.planning.timeline import Transfer
from tests.helpers.launch import ROOT

MEASURED = ROOT / "docs" / "results" / "collectives-cpu.json"


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


def test_latency_grows_with_the_ranks() -> None:
    link = Link(1e-4, 0.0, 2)
    assert link.seconds(Transfer("all_gather", 0, 9)) == pytest.approx(8e-4)


def test_results_of_the_benchmark_are_read() -> None:
    sockets, shared = (Network.read(MEASURED, transport) for transport in (SOCKETS, HOST))
    transfer = Transfer("all_gather", 2**22, 2)
    assert sockets.num_ranks == 2
    assert sockets.seconds(transfer) > shared.seconds(transfer) > 0
    assert sockets.seconds(Transfer("reduce_scatter_sum", 2**22, 2)) != sockets.seconds(transfer)


def _without_sizes(results: dict[str, Any]) -> None:
    results["timings"] = [timing for timing in results["timings"] if timing["nbytes"] <= 65536]


def _of_one_rank(results: dict[str, Any]) -> None:
    results["config"]["bench"]["ranks"] = 1


def _of_another_suite(results: dict[str, Any]) -> None:
    results["suite"] = "optimizer"


@pytest.mark.parametrize("change", [_without_sizes, _of_one_rank, _of_another_suite])
def test_results_that_tell_too_little_are_refused(tmp_path: Path, change: Any) -> None:
    results = json.loads(MEASURED.read_text())
    change(results)
    path = tmp_path / "network.json"
    path.write_text(json.dumps(results))
    with pytest.raises(ConfigError, match="two sizes, by two ranks or more; run dtrain bench collectives"):
        Network.read(path, SOCKETS)


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", '{"suite": "collectives", "config": {"bench": {"ranks": 2}}}'])
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "network.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"network\.json is no result of dtrain bench collectives bench\.out=FILE"):
        Network.read(path, SOCKETS)


def test_a_transport_that_was_not_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="through nccl"):
        Network.read(MEASURED, NCCL)
