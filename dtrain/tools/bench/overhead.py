"""What dtrain's engines cost over the libraries below them: each against the peer that has the library do the same."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import median

from dtrain.tools.bench.records import Entry
from dtrain.tools.bench.tables import ratios, spread
from dtrain.tools.tables import Column, markdown_table

TARGET = 0.02
"""What an engine over a library may cost beyond noise, as a share of the library's step."""

_ERROR = 0.05  # how often an interval may miss
_COMMON = (
    "Overhead of dtrain's engines over the libraries below them: ratios of turns that follow each other in each round, "
    "median (least to most). The interval holds the median ratio at a confidence of 95 % or more, whatever the "
    "distribution (order statistics; it takes six rounds). 'At most 2 %': yes where the whole interval lies below, no "
    "where all of it lies above, else open. The control is the peer once more, in processes of its own: its row shows "
    "what noise makes of equal work."
)
_ON_TOP = (
    "every engine of dtrain: one vote a step, a watch on each gradient as it leaves backward, random numbers keyed by "
    "the micro-batch, clipping within the update where a peer takes a pass of its own, and norms and softmax in FP32, "
    "which the peers leave in BF16 (on a GPU only those without autocast, fsdp2 and deepspeed)"
)
_DIFFERENCES = {
    "ddp": "ddp: dtrain's takes parameters that a forward does not use, which costs a walk over the graph; the peer "
    "does not",
    "fsdp2": "fsdp2: the norms' weights are BF16 in the peer's forward, FP32 in dtrain's; both reduce in FP32",
    "deepspeed": "deepspeed: the peer is told to send and sum gradients in FP32, as dtrain has it (DeepSpeed's default "
    "is BF16); its masters start from BF16-rounded weights, dtrain's from the FP32 ones",
}
"""By engine: where its work is not its peer's."""


def describe_overheads(entries: Sequence[Entry]) -> list[str]:
    """The table of the pairs, and what its columns mean; nothing where no pair ran to the end."""
    by_name = {entry.contender.name: entry for entry in entries}
    pairs = [(entry, by_name[pair]) for entry in entries if (pair := entry.contender.pair) in by_name and pair]
    if not pairs:
        return []
    columns: list[Column[tuple[Entry, Entry]]] = [
        ("contender", lambda pair: pair[0].contender.name + ("" if pair[0].contender.is_dtrain else " (control)")),
        ("its peer", lambda pair: pair[1].contender.name),
        ("step / peer's", lambda pair: spread(ratios(*pair), 3)),
        ("CPU / peer's", lambda pair: spread(_cpu_ratios(*pair), 3)),
        ("overhead, 95 % interval", lambda pair: _overhead(ratios(*pair))),
        ("at most 2 %", lambda pair: verdict(ratios(*pair)) if pair[0].contender.is_dtrain else ""),
    ]
    raced = {entry.contender.engine for entry, _ in pairs if entry.contender.is_dtrain}
    differences = [_ON_TOP, *(text for engine, text in _DIFFERENCES.items() if engine in raced)]
    listed = "\n".join(f"- {text}." for text in differences)
    return [_COMMON, markdown_table(columns, pairs), f"Where the work of a pair differs:\n\n{listed}"]


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Holds the median of what ``values`` were drawn from, at a confidence of 95 % or more; None: fewer than six.

    Its ends are two of the values, equally far from either end: all lie on one side of the median as often as a coin
    falls so.
    """
    ordered, count = sorted(values), len(values)
    depth = 0
    while 2 * sum(comb(count, below) for below in range(depth + 1)) <= _ERROR * 2**count:
        depth += 1
    return (ordered[depth - 1], ordered[-depth]) if depth else None


def verdict(of_rounds: Sequence[float]) -> str:
    """Whether ratios to the peer keep the target: yes, no, open (noise hides it), or too few rounds."""
    interval = median_interval(of_rounds)
    if interval is None:
        return "too few rounds"
    low, high = interval
    return "yes" if high <= 1 + TARGET else "no" if low > 1 + TARGET else "open"


def _overhead(of_rounds: list[float]) -> str:
    interval = median_interval(of_rounds)
    said = f"{_percent(median(of_rounds))} %"
    return said if interval is None else f"{said} ({_percent(interval[0])} to {_percent(interval[1])})"


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f}"


def _cpu_ratios(entry: Entry, peer: Entry) -> list[float]:
    turns = zip(entry.turns, peer.turns, strict=True)
    return [median(own.cpu_ms) / median(other.cpu_ms) for own, other in turns]
