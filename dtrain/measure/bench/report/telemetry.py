"""The table of what sampled steps cost."""

from __future__ import annotations

from collections.abc import Sequence

from dtrain.config.schema import TelemetryConfig
from dtrain.measure.bench.records import CaseResult
from dtrain.measure.bench.report.statistics import all_steps_ms, ratios, spread
from dtrain.tools.tables import Column, Table

TELEMETRY_NOTE = (
    "A sampled step measures every gradient and update, sums over the ranks, and writes its file. Cost of a run: that "
    "of a sampled step above one without, spread over the default interval. Median (least to most); ratios over the "
    "rounds."
)


def telemetry_table(results: Sequence[CaseResult]) -> Table:
    """Returns the sampled cases, each beside the one without samples."""
    without = {result.case.precision: result for result in results if not result.case.samples}
    every = TelemetryConfig().precision_every
    pairs = [
        (result, without[result.case.precision])
        for result in results
        if result.case.samples and result.case.precision in without
    ]
    columns: list[Column[tuple[CaseResult, CaseResult]]] = [
        ("precision", lambda pair: pair[0].case.precision),
        ("ranks", lambda pair: str(pair[0].case.ranks)),
        ("step ms", lambda pair: spread(all_steps_ms(pair[1]), 1)),
        ("sampled step ms", lambda pair: spread(all_steps_ms(pair[0]), 1)),
        ("sampled / step", lambda pair: spread(ratios(*pair), 3)),
        (
            f"cost of a run, every {every} steps",
            lambda pair: spread([100 * (ratio - 1) / every for ratio in ratios(*pair)], 2) + " %",
        ),
    ]
    return Table.of("Sampled steps", columns, pairs)
