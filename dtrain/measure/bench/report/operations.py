"""Reports on the suites that time operations: optimizer, collectives and checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from dtrain.measure.bench.records import MatrixTraffic, OperationResults, OperationTiming
from dtrain.measure.bench.report.report import Report, origin
from dtrain.measure.bench.report.statistics import spread
from dtrain.telemetry.texts import compact
from dtrain.tools.tables import Column, Table

_NOTE = "Times: median (least to most) over the rounds. Ratios are of times in the same round."


def describe_operations(results: OperationResults) -> Report:
    found = {(timing.workload, timing.case): timing for timing in results.timings}

    def share(timing: OperationTiming) -> str:
        reference = found[timing.workload, str(results.reference)].gb_per_s()
        return spread([own / other for own, other in zip(timing.gb_per_s(), reference, strict=True)], 2)

    def speed_up(timing: OperationTiming, name: str) -> str:
        baseline = found.get((timing.workload, name))
        if baseline is None:
            return ""
        return spread([other / own for own, other in zip(timing.ms, baseline.ms, strict=True)], 2)

    columns: list[Column[OperationTiming]] = [
        ("case", lambda timing: timing.case),
        ("ms", lambda timing: spread(timing.ms, 2)),
    ]
    if any(timing.workload for timing in results.timings):
        columns.insert(0, ("workload", lambda timing: timing.workload))
    if any(timing.nbytes for timing in results.timings):
        columns.append(("GB/s", lambda timing: f"{median(timing.gb_per_s()):.1f}" if timing.nbytes else ""))
    if results.reference is not None:
        columns.append((f"GB/s / {results.reference}", lambda timing: share(timing) if timing.nbytes else ""))
    if any(timing.flops for timing in results.timings):
        columns.append(("TFLOP/s", lambda timing: f"{median(timing.tflop_per_s()):.3f}" if timing.flops else ""))
    if any(timing.tokens for timing in results.timings):
        columns.append(("tokens/s", lambda timing: compact(median(timing.tokens_per_s()))))
    for name in dict.fromkeys(name for timing in results.timings for name in timing.shares):
        columns.append((name, lambda timing, name=name: _share(timing, name)))  # type: ignore[misc]
    for name in results.baselines:
        columns.append((f"speed-up over {name}", lambda timing, name=name: speed_up(timing, name)))  # type: ignore[misc]
    rounds = f"{len(results.timings[0].ms)} rounds; load before them {results.load:.1f}."
    facts = [*origin(results), f"{results.description} {rounds}"]
    facts += [_traffic(results.traffic)] if results.traffic else []
    return Report(facts, [Table.of("Times", columns, results.timings)], [_NOTE])


def _share(timing: OperationTiming, name: str) -> str:
    return f"{timing.shares[name]:.1%}" if name in timing.shares else ""


def _traffic(traffic: Sequence[MatrixTraffic]) -> str:
    sent = ", ".join(f"{one.bytes_per_parameter:.2f} on {one.ranks} ranks" for one in traffic)
    return (
        f"Traffic of {traffic[0].optimizer} at stages 1 to 3, bytes a matrix parameter that all ranks send in a "
        f"step, to the matrices' owners and back: {sent}; at most {traffic[0].bound:g} on any number."
    )
