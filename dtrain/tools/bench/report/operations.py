"""Reports on the suites that time operations: optimizer, collectives and checkpoint."""

from __future__ import annotations

from statistics import median

from dtrain.tools.bench.records import OperationResults, OperationTiming
from dtrain.tools.bench.report.report import Report, origin
from dtrain.tools.bench.report.statistics import spread
from dtrain.tools.tables import Column, Table

_NOTE = "Times: median (least to most) over the rounds. Ratios are of times in the same round."


def describe_operations(results: OperationResults) -> Report:
    found = {(timing.workload, timing.case): timing for timing in results.timings}

    def share(timing: OperationTiming) -> str:
        reference = found[timing.workload, str(results.reference)].gb_per_s()
        return spread([own / other for own, other in zip(timing.gb_per_s(), reference, strict=True)], 2)

    def speed_up(timing: OperationTiming, name: str) -> str:
        baseline = found[timing.workload, name]
        return spread([other / own for own, other in zip(timing.ms, baseline.ms, strict=True)], 2)

    columns: list[Column[OperationTiming]] = [
        ("case", lambda timing: timing.case),
        ("ms", lambda timing: spread(timing.ms, 2)),
        ("GB/s", lambda timing: f"{median(timing.gb_per_s()):.1f}"),
        *((f"speed-up over {name}", lambda timing, name=name: speed_up(timing, name)) for name in results.baselines),
    ]
    if results.reference is not None:
        columns.insert(3, (f"GB/s / {results.reference}", share))
    if any(timing.workload for timing in results.timings):
        columns.insert(0, ("workload", lambda timing: timing.workload))
    rounds = f"{len(results.timings[0].ms)} rounds; load before them {results.load:.1f}."
    facts = [*origin(results), f"{results.description} {rounds}"]
    return Report(facts, [Table.of("Times", columns, results.timings)], [_NOTE])
