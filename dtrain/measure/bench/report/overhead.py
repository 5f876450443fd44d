"""The overhead of dtrain's engines over the libraries below them: each against the peer that does the same work."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import median

from dtrain.measure.bench.records import CaseResult
from dtrain.measure.bench.report.statistics import cpu_ratios, ratios, spread
from dtrain.tools.tables import Column, Table

TARGET = 0.02
"""Largest overhead of an engine beyond noise, as a share of the library's step."""

OVERHEAD_NOTES = [
    "Overhead: ratios of the engine's and its peer's steps in each round, median (least to most). The interval holds "
    "the median ratio at a confidence of 95 % or more, whatever the distribution (order statistics; needs six "
    "rounds). 'At most 2 %': yes if the whole interval lies below, no if all of it lies above, else open. The "
    "control is the peer once more, in other processes: its row shows the noise of equal work.",
    "The work of a pair differs in this:\n\n"
    "- every engine of dtrain adds one vote a step, a check of each gradient, and random numbers keyed by the "
    "micro-batch; it clips within the update instead of in a pass of its own, and keeps norms and softmax in FP32, "
    "which the peers compute in BF16 (on a GPU only fsdp2 and deepspeed do, which use no autocast);\n"
    "- ddp: dtrain's engine accepts parameters that a forward does not use, which costs a walk over the graph;\n"
    "- fsdp2: the norms' weights are BF16 in the peer's forward, FP32 in dtrain's; both reduce in FP32;\n"
    "- deepspeed: the peer is set to send and sum gradients in FP32 as dtrain does (DeepSpeed's default is BF16); "
    "its masters start from BF16-rounded weights, dtrain's from the FP32 ones.",
]
_ERROR = 0.05  # largest probability that an interval misses the median


def overhead_table(results: Sequence[CaseResult]) -> Table | None:
    """Returns a row for each pair of case and baseline; None if no pair ran to the end."""
    by_name = {result.case.name: result for result in results}
    pairs = [(result, by_name[name]) for result in results if (name := result.case.baseline) in by_name and name]
    if not pairs:
        return None
    columns: list[Column[tuple[CaseResult, CaseResult]]] = [
        ("case", lambda pair: pair[0].case.name + ("" if pair[0].case.is_dtrain else " (control)")),
        ("its peer", lambda pair: pair[1].case.name),
        ("step / peer's", lambda pair: spread(ratios(*pair), 3)),
        ("CPU / peer's", lambda pair: spread(cpu_ratios(*pair), 3)),
        ("overhead, 95 % interval", lambda pair: _overhead(ratios(*pair))),
        ("at most 2 %", lambda pair: meets_target(ratios(*pair)) if pair[0].case.is_dtrain else ""),
    ]
    return Table.of("Overhead", columns, pairs)


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Returns an interval that holds the median of the values' distribution at a confidence of 95 % or more.

    Its ends are two of the values, equally far from either end of their order. The chance that it misses is that of
    a coin: each value lies on either side of the true median with equal probability. None for fewer than six values.
    """
    ordered, count = sorted(values), len(values)
    depth = 0
    while 2 * sum(comb(count, below) for below in range(depth + 1)) <= _ERROR * 2**count:
        depth += 1
    return (ordered[depth - 1], ordered[-depth]) if depth else None


def meets_target(of_rounds: Sequence[float]) -> str:
    """Whether ratios to the peer keep the target: yes, no, open (hidden by noise), or too few rounds."""
    interval = median_interval(of_rounds)
    if interval is None:
        return "too few rounds"
    lower, upper = interval
    return "yes" if upper <= 1 + TARGET else "no" if lower > 1 + TARGET else "open"


def _overhead(of_rounds: list[float]) -> str:
    interval = median_interval(of_rounds)
    text = f"{_percent(median(of_rounds))} %"
    return text if interval is None else f"{text} ({_percent(interval[0])} to {_percent(interval[1])})"


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f}"
