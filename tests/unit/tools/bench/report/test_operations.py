"""The report on operations."""

from __future__ import annotations

from pathlib import Path

from dtrain.tools.bench.records import OperationResults, OperationTiming, read_results, write_results
from dtrain.tools.bench.report.document import describe
from tests.unit.tools.bench.made import HOST


def test_the_table_compares_times_of_one_round(tmp_path: Path) -> None:
    timings = [OperationTiming("triad", 12_000_000, [1.0, 2.0]), OperationTiming("dtrain", 24_000_000, [2.0, 2.0])]
    date = "2026-01-01T00:00:00"
    made = OperationResults(
        "optimizer",
        "dtrain bench optimizer",
        date,
        HOST,
        {"bench": {}},
        0.5,
        "Few elements.",
        "triad",
        ["triad"],
        timings,
    )
    write_results(tmp_path / "made.json", made)
    assert read_results(tmp_path / "made.json") == made
    report = describe(made)
    (table,) = report.tables
    assert table.columns == ("case", "ms", "GB/s", "GB/s / triad", "speed-up over triad")
    assert table.rows[1] == ("dtrain", "2.00 (2.00 to 2.00)", "12.0", "1.50 (1.00 to 2.00)", "0.75 (0.50 to 1.00)")
    assert "Few elements. 2 rounds; load before them 0.5." in report.facts
