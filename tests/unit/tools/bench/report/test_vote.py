"""The report on the vote suite."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from dtrain.tools.bench.records import BenchmarkCase, CaseResult, TimedSteps
from dtrain.tools.bench.report.document import describe
from dtrain.tools.bench.report.statistics import ratios
from tests.unit.tools.bench.made import case_result, results_of, row

PARTS = {
    "vote": [[3.0, 1.0], [1.0, 5.0], [2.0, 6.0]],  # of each step: rank 0, rank 1
    "norm": [[0.5, 0.25], [0.5, 0.25], [0.5, 0.25]],
    "all-gather": [[2.0, 0.5], [0.25, 4.5], [1.0, 5.5]],
}


def vote_result(precision: str, mode: str, step_ms: list[float]) -> CaseResult:
    """A result with one step a round, and PARTS in those steps."""
    case = BenchmarkCase(f"{precision}, {mode}", "native", 2, precision, 2, loss_scale=mode, times_vote=True)
    rounds = []
    for number, step in enumerate(step_ms):
        parts = {name: [[ms] for ms in steps[number]] for name, steps in PARTS.items()}
        rounds.append(TimedSteps([step], [2.0], 0.5, [step], parts))
    return replace(case_result(case, [[1.0]]), rounds=rounds)


def test_the_table_separates_waiting_from_work() -> None:
    none = vote_result("bf16", "none", [100.0, 100.0, 200.0])
    dynamic = vote_result("bf16", "dynamic", [101.0, 102.0, 200.0])
    without_baseline = vote_result("fp16", "dynamic", [100.0, 100.0, 100.0])
    results = results_of([none, dynamic, without_baseline], "vote")
    vote, steps, _ = describe(results).tables
    assert [row(steps, case.case.name)["step / loss scale none"] for case in results.cases] == [
        "1.0000 (1.0000 to 1.0000)",
        "1.0100 (1.0000 to 1.0200)",
        "not measured",
    ]
    assert median(ratios(dynamic, none)) == pytest.approx(1.01)
    assert [list(cells[1:]) for cells in vote.rows[:5]] == [
        ["vote", "2.000, 5.000", "5.000 (3.000 to 6.000)", "3.00%", "1.000 (1.000 to 2.000)", "1.00%"],
        ["norm", "0.500, 0.250", "0.500 (0.500 to 0.500)", "0.50%", "0.250 (0.250 to 0.250)", "0.25%"],
        ["vote without norm", "1.500, 4.750", "4.750 (2.500 to 5.750)", "2.88%", "0.750 (0.500 to 1.500)", "0.75%"],
        ["all-gather", "1.000, 4.500", "4.500 (2.000 to 5.500)", "2.75%", "0.500 (0.250 to 1.000)", "0.50%"],
        ["record, decision", "0.500, 0.250", "0.500 (0.250 to 0.500)", "0.25%", "0.250 (0.250 to 0.250)", "0.25%"],
    ]
    assert {cells[0] for cells in vote.rows[:5]} == {"bf16, none"}
    assert "1.0100" not in describe(replace(results, cases=[none])).markdown()
