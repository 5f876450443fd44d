"""The optimizer phase: bytes and shares by hand, its page, and one run on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dtrain.tools.accept.parts import optimizer
from dtrain.tools.accept.parts.optimizer import bandwidth_share, conclusions, moved_bytes, run, section, torch_speed_ups
from tests.unit.tools.accept.made import last, request

TRACE = {"num_launches": 4, "num_copies": 1, "synchronizations": {}, "top": [{"name": "k", "calls": 3, "ms": 1.5}]}


def case(name: str = "1.2B", num_parameters: int = 1_000_000_000, **changes: Any) -> dict[str, Any]:
    """30 GB in 10 ms, while 2 GB are copied in 0.6 ms."""
    made = {
        "name": name, "num_parameters": num_parameters, "bytes_a_parameter": 34.0, "host_ms": [1.0],
        "ms": {"dtrain": [10.0, 9.0, 11.0], "torch": [22.0, 18.0, 33.0], "copy": [0.6, 0.6, 0.7]},
        "copy_bytes": 2_000_000_000, "trace": TRACE, "errors": [],
    }  # fmt: skip
    return made | changes


def test_bytes_are_counted_by_what_the_engine_holds() -> None:
    numel = 1000
    states = {"master": 4 * numel, "moments": 8 * numel, "buffers": 17}
    assert moved_bytes({**states, "compute": 2 * numel, "main_grad": 2 * numel}) == 30 * numel
    assert moved_bytes({**states, "compute": 2 * numel, "main_grad": 4 * numel}) == 34 * numel


def test_share_of_the_copy_and_speed_up_over_torch() -> None:
    # 3,000 GB/s of 3,333
    assert bandwidth_share(case(), 30) == pytest.approx(0.9)
    assert bandwidth_share(case(), 34) == pytest.approx(0.9 * 34 / 30)
    assert torch_speed_ups(case()) == pytest.approx([2.2, 2.0, 3.0])


def test_the_page_is_read_at_the_most_parameters() -> None:
    results = {"device": "NVIDIA H200", "cases": [case(), case("50M", 50_000_000, trace=None)]}
    assert conclusions(results) == [
        "1G parameters: 10.00 ms, 102.0% of the copy's bandwidth at 34 bytes a parameter, 90.0% at 30; "
        "2.20 x torch's sequence",
        "4 kernel launches, 1 copies and fills by the driver; waits of the host: 0",
    ]
    assert "4 kernel launches (operations on a CPU)" in conclusions(results | {"device": "cpu"})[1]
    assert "| `k`" in "\n".join(section(results))


def test_the_page_says_what_is_missing() -> None:
    without = case(trace=None, ms={"dtrain": [10.0], "torch": [], "copy": [1.0]})
    bandwidth, launches = conclusions({"cases": [without]})
    assert "torch's sequence not measured" in bandwidth
    assert launches == "launches: not measured, because there is no trace"
    assert "not measured" in "\n".join(section({"cases": [without]}))
    assert section({}) == conclusions({}) == ["optimizer phase: not measured"]
    waiting = case(trace={**TRACE, "synchronizations": {"cudaStreamSynchronize": 2}})
    assert "2 cudaStreamSynchronize" in conclusions({"cases": [waiting]})[1]


def test_a_run_on_a_cpu(tmp_path: Path) -> None:
    results = last(run(request(tmp_path, seconds=20.0)))
    assert (results["failures"], results["device"]) == ([], "cpu")
    (found,) = results["cases"]
    assert {key: len(values) for key, values in found["ms"].items()} == {"dtrain": 5, "torch": 5, "copy": 5}
    assert 26 < found["bytes_a_parameter"] < 36
    assert found["trace"]["num_launches"] > 0


def test_a_size_that_fails_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(name: str, *_: Any) -> dict[str, Any]:
        if name == "50M":
            raise RuntimeError("no kernel image\nsecond line")
        return case(name, errors=["trace: no profiler"])

    monkeypatch.setattr(optimizer, "measure", measure)
    results = last(run(request(tmp_path, seconds=20.0, small=False)))
    assert [found["name"] for found in results["cases"]] == ["1.2B", "400M"]
    assert results["failures"][0] == "50M: RuntimeError: no kernel image second line"
    assert results["failures"][1:] == ["1.2B: trace: no profiler", "400M: trace: no profiler"]
    late = last(run(request(tmp_path, seconds=0.0, small=False)))
    assert (len(late["cases"]), late["left_out"]) == (1, {"400M": "no time left"})
