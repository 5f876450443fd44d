"""The report on the FP8 suite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dtrain.tools.bench.operations.float8_products import ALL_THREE
from dtrain.tools.bench.records import (
    BenchmarkCase,
    CaseResult,
    FailedCase,
    Float8Results,
    LinearFormat,
    ProductTimes,
    WidthResults,
    read_results,
    write_results,
)
from dtrain.tools.bench.report.float8 import describe_float8
from tests.unit.tools.bench.made import HOST, case_result, row

PRODUCTS = ["output", "input gradient", "weight gradient", ALL_THREE]
LINEARS = [
    *(LinearFormat(f"blocks.{n}.up", 64, 32, "fp8", "timed 0.81 of BF16") for n in range(2)),
    LinearFormat("head", 48, 32, "bf16", "last product"),
]


def float8_result(name: str, step_ms: list[float], loss: float, linears: list[LinearFormat]) -> CaseResult:
    precision, _, recipe = name.partition(" ")
    case = BenchmarkCase(name, "native", 1, precision, 2, recipe=recipe or None)
    made = case_result(case, [[ms] for ms in step_ms], [loss])
    return replace(made, footprint=replace(made.footprint, linears=linears))


def made_results() -> Float8Results:
    cases = [
        float8_result("bf16", [100.0, 200.0], 2.0, []),
        float8_result("fp8 rowwise", [50.0, 160.0], 2.005, LINEARS),
    ]
    products = [ProductTimes(name, 1000, 64, 32, {"bf16": [2.0, 4.0], "rowwise": [1.0, 1.0]}) for name in PRODUCTS]
    late = FailedCase(BenchmarkCase("fp8 tensorwise", "native", 1, "fp8", 2), "fp8 tensorwise: rank 0 failed: memory")
    config = {"bench": {"threads_per_rank": 1, "rounds": 2, "steps": 1, "ranks": 1}}
    widths = [WidthResults(32, cases, products, [late])]
    return Float8Results("float8", "dtrain bench float8", "2026-01-01T00:00:00", HOST, config, 1000, False, widths)


def test_the_tables_compare_round_by_round(tmp_path: Path) -> None:
    results = made_results()
    write_results(tmp_path / "made.json", results)
    assert read_results(tmp_path / "made.json") == results
    report = describe_float8(results)
    assert "the times say nothing" not in report.markdown()
    steps, linears, products = report.tables
    fp8 = dict(zip(steps.columns, steps.rows[1], strict=True))
    assert (fp8["width"], fp8["case"]) == ("32", "fp8 rowwise")
    assert (fp8["loss against bf16"], fp8["speed-up over bf16"]) == ("+0.25 %", "1.625 (1.250 to 2.000)")
    assert fp8["tokens/s"] == "9.52k"  # 1,000 tokens in 105 ms
    assert linears.title == "Linears at width 32, fp8 rowwise"
    assert list(linears.rows) == [
        ("blocks.0.up", "2", "64 x 32", "fp8", "timed 0.81 of BF16"),
        ("head", "1", "48 x 32", "bf16", "last product"),
    ]
    assert [row(products, name)["M x N x K"] for name in PRODUCTS] == [
        *("1000 x 64 x 32", "1000 x 32 x 64", "64 x 32 x 1000", "1000 x 64 x 32")
    ]
    # 2 x 1000 x 64 x 32 operations in 3 ms; all three products are three times as much
    assert row(products, "output")["bf16 ms"] == "3.000"
    assert products.rows[0][3] == "0.00137"
    assert products.rows[3][3] == "0.0041"
    assert row(products, "output")["rowwise speed-up"] == "3.00 (2.00 to 4.00)"
    assert "Did not run: fp8 tensorwise: rank 0 failed: memory." in report.facts
    assert [failure.case.name for failure in results.failures] == ["fp8 tensorwise"]


def test_cases_with_equal_formats_share_a_table() -> None:
    results = made_results()
    (width,) = results.widths
    bf16, fp8 = width.cases
    other = replace(fp8, case=replace(fp8.case, name="fp8 tensorwise"))
    report = describe_float8(replace(results, widths=[replace(width, cases=[bf16, fp8, other])]))
    assert [table.title for table in report.tables] == [
        *("Steps and memory", "Linears at width 32, fp8 rowwise, fp8 tensorwise", "Products at width 32")
    ]


def test_without_bf16_nothing_is_compared() -> None:
    results = made_results()
    (width,) = results.widths
    report = describe_float8(replace(results, widths=[replace(width, cases=width.cases[1:], products=[])]))
    (fp8,) = report.tables[0].rows
    assert fp8[-2:] == ("not measured", "not measured")
