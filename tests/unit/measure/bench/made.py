"""Command-line keys of tiny runs, and results made by hand."""

from __future__ import annotations

from dtrain.measure.bench.records import BenchmarkCase, CaseResult, Footprint, TimedSteps, TrainingResults
from dtrain.telemetry.host import Host
from dtrain.tools.tables import Table

TINY = ["model.num_layers=1", "model.hidden_dim=32", "model.num_heads=2", "model.max_seq_len=32", "bench.device=cpu"]
SHORT = ["bench.micro_batch_size=2", "bench.warmup_steps=1", "bench.rounds=2", "bench.steps=2"]
HOST = Host("a cpu", 2, 8.0, [], "Linux x86_64", "3.11", "2.13", "0.1.0")


def case_result(case: BenchmarkCase, rounds: list[list[float]], losses: list[float | None] | None = None) -> CaseResult:
    """A result with the step times of each round, and the same losses in every round."""
    formula = {"master": 4000} if case.is_dtrain else None
    footprint = Footprint(1000, {"master": 4000}, formula, 2**27, None, "cpu")
    made = [TimedSteps(step_ms, losses or [2.0], 0.5) for step_ms in rounds]
    return CaseResult(case, 1.5, TimedSteps([], [], 0.1), made, footprint)


def result(
    name: str, ranks: int, rounds: list[list[float]], losses: list[float | None] | None = None, engine: str = "native"
) -> CaseResult:
    """A result of the native engine at stage 2, or of the peer ``engine``."""
    stage = 2 if engine == "native" else None
    return case_result(BenchmarkCase(name, engine, ranks, "bf16", stage), rounds, losses)


def results_of(cases: list[CaseResult], suite: str = "engine") -> TrainingResults:
    """A run of these cases."""
    config = {"bench": {"threads_per_rank": 1, "rounds": 2, "steps": 2}}
    head = {"command": f"dtrain bench {suite}", "date": "2026-01-01T00:00:00", "host": HOST, "config": config}
    return TrainingResults(suite, 128, cases, [3.0, 5.0, 4.0], **head)  # type: ignore[arg-type]


def row(table: Table, first: str) -> dict[str, str]:
    """The only row whose first cell is ``first``, by column."""
    (found,) = (cells for cells in table.rows if cells[0] == first)
    return dict(zip(table.columns, found, strict=True))
