"""The first tables of the suites vote, telemetry and blocks, and the notes on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from dtrain.config.schema import TelemetryConfig
from dtrain.measure.bench.records import CaseResult
from dtrain.measure.bench.report.statistics import all_steps_ms, cpu_ratios, ratios, spread
from dtrain.tools.tables import Column, Table

_VOTE_NOTE = (
    "Parts of the vote: norm (one pass over this rank's main grads, which clipping needs too), record, all-gather, "
    "decision; median (least to most) over all timed steps. A rank waits in the all-gather until the last one "
    "arrives. So 'slowest' is the rank that took longest in a step, waiting included, and 'fastest' the one that "
    "took least, the cost if all arrived at once. Shares are of the step on its slowest rank."
)


@dataclass(frozen=True)
class _VotePart:
    case: str
    name: str
    ms: list[tuple[float, ...]]  # of each timed step, on each rank
    step_ms: list[float]  # of each timed step, on its slowest rank


def _vote_table(results: Sequence[CaseResult]) -> Table:
    def by_rank(part: _VotePart) -> str:
        return ", ".join(f"{median(times):.3f}" for times in zip(*part.ms, strict=True))

    def share(part: _VotePart, times: list[float]) -> str:
        return f"{median(own / step for own, step in zip(times, part.step_ms, strict=True)):.2%}"

    columns: list[Column[_VotePart]] = [
        ("case", lambda part: part.case),
        ("part", lambda part: part.name),
        ("ms by rank", by_rank),
        ("slowest ms", lambda part: spread([max(ranks) for ranks in part.ms], 3)),
        ("slowest / step", lambda part: share(part, [max(ranks) for ranks in part.ms])),
        ("fastest ms", lambda part: spread([min(ranks) for ranks in part.ms], 3)),
        ("fastest / step", lambda part: share(part, [min(ranks) for ranks in part.ms])),
    ]
    return Table.of("Vote", columns, [part for result in results for part in _parts(result)])


def _parts(result: CaseResult) -> list[_VotePart]:
    def timed(name: str) -> list[tuple[float, ...]]:
        return [ranks for steps in result.rounds for ranks in zip(*steps.parts_ms[name], strict=True)]

    vote, norm, gather = timed("vote"), timed("norm"), timed("all-gather")
    without_norm = _difference(vote, norm)
    parts = {
        "vote": vote,
        "norm": norm,
        "vote without norm": without_norm,
        "all-gather": gather,
        "record, decision": _difference(without_norm, gather),
    }
    return [_VotePart(result.case.name, name, ms, all_steps_ms(result)) for name, ms in parts.items()]


def _difference(whole: list[tuple[float, ...]], part: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
    return [tuple(a - b for a, b in zip(*pair, strict=True)) for pair in zip(whole, part, strict=True)]


_TELEMETRY_NOTE = (
    "A sampled step measures every gradient and update, sums over the ranks, and writes its file. Cost of a run: that "
    "of a sampled step above one without, spread over the default interval. Median (least to most); ratios over the "
    "rounds."
)


def _telemetry_table(results: Sequence[CaseResult]) -> Table:
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


_NEITHER = "none"
"""Name of the case whose blocks are neither recomputed nor compiled."""

_BLOCKS_NOTE = (
    "Cases are named by model.recompute, and by model.compile=blocks. Activations: bytes that the forward of one "
    "micro-batch leaves for backward, each storage once, by the allocator. Graphs: into which the blocks were "
    "compiled. CPU: processor time of a step. First step: from the start of the process, with compilation unless its "
    "cache holds the code."
)


def _blocks_table(results: Sequence[CaseResult]) -> Table:
    """Returns a row for each case, beside the one without recomputation and compilation if it was measured."""
    baseline = next((result for result in results if result.case.name == _NEITHER), None)

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
        (f"step / {_NEITHER}", lambda result: "" if baseline is None else spread(ratios(result, baseline), 3)),
        (f"CPU / {_NEITHER}", lambda result: "" if baseline is None else spread(cpu_ratios(result, baseline), 3)),
        (f"activations MiB (/ {_NEITHER})", activations),
        ("graphs", lambda result: "" if result.footprint.graphs is None else str(result.footprint.graphs)),
        ("first step s", lambda result: f"{result.first_step_s:.1f}"),
    ]
    return Table.of("Blocks", columns, results)


FIRST_TABLES: Mapping[str, tuple[Callable[[Sequence[CaseResult]], Table], str]] = {
    "vote": (_vote_table, _VOTE_NOTE),
    "telemetry": (_telemetry_table, _TELEMETRY_NOTE),
    "blocks": (_blocks_table, _BLOCKS_NOTE),
}
"""Table and note by suite."""
