"""The overhead of dtrain's engines over their peers: the table, and the interval of the median."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import median

import pytest

from dtrain.tools.bench.records import BenchmarkCase, CaseResult
from dtrain.tools.bench.report.document import describe
from dtrain.tools.bench.report.overhead import median_interval, meets_target, overhead_table
from dtrain.tools.bench.report.training import fastest_peer
from tests.unit.tools.bench.made import case_result, results_of


def overhead_result(case: BenchmarkCase, ms: list[float], cpu_ms: list[float] | None = None) -> CaseResult:
    made = case_result(case, [[value] for value in ms])
    rounds = [replace(timed, cpu_ms=[cpu]) for timed, cpu in zip(made.rounds, cpu_ms or ms, strict=True)]
    return replace(made, rounds=rounds)


PEER = overhead_result(BenchmarkCase("ddp", "ddp", 2, "bf16"), [100.0] * 6)
ENGINE = overhead_result(
    BenchmarkCase("dtrain ddp", "ddp", 2, "bf16", 0, baseline="ddp"),
    [101.0, 101.0, 101.0, 101.9, 100.5, 101.0],
    [104.0, 103.0, 104.0, 104.0, 104.0, 105.0],
)
CONTROL = overhead_result(
    BenchmarkCase("ddp again", "ddp", 2, "bf16", baseline="ddp"), [100.0, 100.0, 99.0, 100.0, 102.0, 100.0]
)
UNPAIRED = overhead_result(
    BenchmarkCase("dtrain fsdp2, stage 2", "fsdp2", 2, "bf16", 2, baseline="fsdp2_no_reshard"), [50.0] * 6
)


def test_the_table_of_overheads() -> None:
    table = overhead_table([PEER, ENGINE, CONTROL, UNPAIRED])
    assert table is not None
    assert list(table.rows) == [
        ("dtrain ddp", "ddp", "1.010 (1.005 to 1.019)", "1.040 (1.030 to 1.050)", "+1.0 % (+0.5 to +1.9)", "yes"),
        ("ddp again (control)", "ddp", "1.000 (0.990 to 1.020)", "1.000 (0.990 to 1.020)", "+0.0 % (-1.0 to +2.0)", ""),
    ]
    assert overhead_table([PEER, UNPAIRED]) is None
    # Neither an engine of dtrain nor the control is a peer.
    assert fastest_peer([PEER, ENGINE, CONTROL, UNPAIRED]) is PEER


def test_a_run_without_other_peers_reports_its_overhead_first() -> None:
    results = results_of([PEER, ENGINE, CONTROL])
    assert [table.title for table in describe(results).tables] == ["Steps and memory", "Overhead", "Details"]
    bench = {**results.config["bench"], "peers": []}
    report = describe(replace(results, config={"bench": bench}))
    assert [table.title for table in report.tables] == ["Overhead", "Steps and memory", "Details"]
    assert "the whole interval lies below" in report.markdown()


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([1.0, 1.01, 1.0, 1.0, 1.02, 1.0], "yes"),
        ([1.0, 1.01, 1.0, 1.0, 1.021, 1.0], "open"),
        ([1.3, 1.021, 1.1, 1.1, 1.1, 1.1], "no"),
        ([1.3, 1.019, 1.1, 1.1, 1.1, 1.1], "open"),
        ([1.0] * 5, "too few rounds"),
        ([1.0] * 8 + [1.5], "yes"),  # from nine rounds on, one may be an outlier
        ([1.0] * 7 + [1.5], "open"),
    ],
)
def test_the_target_is_met_or_missed_only_beyond_noise(ratios: list[float], expected: str) -> None:
    assert meets_target(ratios) == expected


@pytest.mark.parametrize("count", [6, 9, 12, 25])
def test_the_interval_holds_the_median_as_often_as_it_says(count: int) -> None:
    draw, true_median = random.Random(count), 2**0.5  # a Pareto distribution: skewed, with outliers
    held = 0
    for _ in range(2000):
        interval = median_interval([draw.paretovariate(2) for _ in range(count)])
        assert interval is not None
        held += interval[0] <= true_median <= interval[1]
    assert 0.94 < held / 2000 < 0.99


def test_the_interval_is_of_the_values_and_the_median_within() -> None:
    values = [3.0, 1.0, 2.0, 9.0, 5.0, 4.0, 8.0, 7.0, 6.0]
    assert median_interval(values) == (2.0, 8.0)
    assert median(values) == 5.0
    assert median_interval(values[:5]) is None
