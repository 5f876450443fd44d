"""The report on the telemetry suite."""

from __future__ import annotations

import torch

from dtrain.config.tool_schema import TelemetryBenchConfig
from dtrain.tools.bench.records import BenchmarkCase
from dtrain.tools.bench.report.document import describe
from dtrain.tools.bench.training.suites import telemetry_cases
from tests.unit.tools.bench.made import case_result, results_of


def test_each_precision_is_measured_without_and_with_samples() -> None:
    bench = TelemetryBenchConfig(precisions=["fp32", "fp8"], ranks=3, zero_stage=1)
    assert telemetry_cases(bench, torch.device("cpu")) == [
        BenchmarkCase(f"{name}, {label}", "native", 3, name, 1, samples=samples)
        for name in ("fp32", "fp8")
        for label, samples in (("off", False), ("sampled", True))
    ]


def test_table_spreads_the_cost_over_the_default_interval() -> None:
    off, sampled = (BenchmarkCase(f"bf16, {n}", "native", 1, "bf16", 2, samples=n == "on") for n in ("off", "on"))
    alone = BenchmarkCase("fp8, on", "native", 1, "fp8", 2, samples=True)
    cases = [
        case_result(off, [[100.0], [200.0]]),
        case_result(sampled, [[120.0], [260.0]]),
        case_result(alone, [[1.0]]),
    ]
    table, steps, _ = describe(results_of(cases, "telemetry")).tables
    assert table.columns[-1] == "cost of a run, every 100 steps"
    assert table.rows == [
        (
            "bf16",
            "1",
            "150.0 (100.0 to 200.0)",
            "190.0 (120.0 to 260.0)",
            "1.250 (1.200 to 1.300)",
            "0.25 (0.20 to 0.30) %",
        )
    ]
    assert [row[0] for row in steps.rows] == ["bf16, off", "bf16, on", "fp8, on"]
