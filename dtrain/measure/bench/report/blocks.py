"""The table of recomputed and compiled blocks: time of a step, and bytes of activations."""

from __future__ import annotations

from collections.abc import Sequence

from dtrain.measure.bench.records import CaseResult
from dtrain.measure.bench.report.statistics import all_steps_ms, cpu_ratios, ratios, spread
from dtrain.tools.tables import Column, Table

NEITHER = "none"
"""Name of the case whose blocks are neither recomputed nor compiled."""

BLOCKS_NOTE = (
    "Cases are named by model.recompute, and by model.compile=blocks. Activations: bytes that the forward of one "
    "micro-batch leaves for backward, each storage once, by the allocator. Graphs: into which the blocks were "
    "compiled. CPU: processor time of a step. First step: from the start of the process, with compilation unless its "
    "cache holds the code."
)


def blocks_table(results: Sequence[CaseResult]) -> Table:
    """Returns a row for each case, beside the one without recomputation and compilation if it was measured."""
    baseline = next((result for result in results if result.case.name == NEITHER), None)

    def activations(result: CaseResult) -> str:
        own = result.footprint.activations
        other = None if baseline is None else baseline.footprint.activations
        if own is None:
            return "not measured"
        return f"{own / 2**20:.2f}" + (f" ({own / other:.3f})" if other else "")

    columns: list[Column[CaseResult]] = [
        ("case", lambda result: result.case.name),
        ("ranks", lambda result: str(result.case.ranks)),
        ("step ms", lambda result: spread(all_steps_ms(result), 1)),
        (f"step / {NEITHER}", lambda result: "" if baseline is None else spread(ratios(result, baseline), 3)),
        (f"CPU / {NEITHER}", lambda result: "" if baseline is None else spread(cpu_ratios(result, baseline), 3)),
        (f"activations MiB (/ {NEITHER})", activations),
        ("graphs", lambda result: "" if result.footprint.graphs is None else str(result.footprint.graphs)),
        ("first step s", lambda result: f"{result.first_step_s:.1f}"),
    ]
    return Table.of("Blocks", columns, results)
