"""The table of the vote's parts in real steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from dtrain.measure.bench.records import CaseResult
from dtrain.measure.bench.report.statistics import all_steps_ms, spread
from dtrain.tools.tables import Column, Table

VOTE_NOTE = (
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


def vote_table(results: Sequence[CaseResult]) -> Table:
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
