"""A rank's step, in which transfers take time and slow the computation that they overlap with."""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field

from dtrain.planning.record.ranks import Transfer

GRADIENTS, WEIGHTS, REPLICAS, VOTE, OTHER = "gradients", "weights", "across replicas", "vote", "other"
PURPOSES = (WEIGHTS, GRADIENTS, REPLICAS, VOTE, OTHER)


def label_group(transfer: Transfer) -> str:
    """Returns what ``transfer`` is for."""
    if transfer.label.endswith(REPLICAS):
        return REPLICAS
    if transfer.op == "gather_rows":
        return VOTE
    if transfer.op in ("all_to_all_single", "reduce_scatter_sum") or transfer.label.startswith("sum "):
        return GRADIENTS
    return WEIGHTS if transfer.op == "all_gather" else OTHER


@dataclass(frozen=True)
class RankTrace:
    """One step of a rank that takes ``seconds``, in which transfers take no time.

    A moment is a time, the number of a transfer, and whether the rank waits for it; else it starts.
    """

    seconds: float
    moments: Sequence[tuple[float, int, bool]]
    transfers: Mapping[int, Transfer]


@dataclass
class Share:
    """Transfers of one purpose: their number, the bytes that a rank receives, and their seconds.

    ``exposed`` are the seconds for which the rank waits.
    """

    count: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    exposed: float = 0.0


@dataclass
class Replay:
    """A step of one rank, in seconds; ``slowed``: by which transfers make its computation longer.

    The shares are by purpose and axis, the waits by label.
    """

    seconds: float
    compute: float
    slowed: float
    shares: Mapping[tuple[str, str], Share] = field(default_factory=dict)
    waits: Mapping[str, float] = field(default_factory=dict)

    def total(self, purpose: str | None = None) -> Share:
        """Returns the transfers of all axes; of all purposes without ``purpose``."""
        found = (astuple(share) for (name, _), share in self.shares.items() if purpose in (name, None))
        return Share(*map(sum, zip(*found, strict=True)))


def replay(
    trace: RankTrace,
    seconds_of: Callable[[Transfer], float],
    *,
    overlaps: bool,
    compute_factor: float = 1.0,
    slowdown: float = 1.0,
) -> Replay:
    """Returns the step of ``trace`` with transfers that take time.

    The transfers of one axis run one after the other, each from when it is started; those of different axes do not
    delay each other. Without ``overlaps`` nothing happens before the rank waits, because it moves the bytes itself. The
    rank computes ``compute_factor`` times as long as the trace, and ``slowdown`` times that while a transfer runs.
    """
    shares: defaultdict[tuple[str, str], Share] = defaultdict(Share)
    waits: defaultdict[str, float] = defaultdict(float)
    ends: dict[int, float] = {}  # of transfers that are not waited for yet; without overlap their seconds
    axis_ends: defaultdict[str, float] = defaultdict(float)
    busy: list[tuple[float, float]] = []  # when transfers run, by their beginning
    now = last = slowed = 0.0
    for seconds, number, is_wait in (*trace.moments, (trace.seconds, -1, True)):
        own = compute_factor * (seconds - last)
        busy = [run for run in busy if run[1] > now]
        after = _computed(now, own, busy, slowdown)
        slowed += after - now - own
        now, last = after, seconds
        if is_wait and number not in ends:  # the end of the step, or a transfer that an earlier step has started
            continue
        transfer = trace.transfers[number]
        share = shares[label_group(transfer), transfer.axis]
        if is_wait:
            end = ends.pop(number)
            waited = max(0.0, end - now) if overlaps else end
            share.exposed += waited
            waits[transfer.label] += waited
            now += waited
            continue
        taken = ends[number] = seconds_of(transfer)
        share.count += 1
        share.nbytes += transfer.nbytes
        share.seconds += taken
        if overlaps:
            begin = max(now, axis_ends[transfer.axis])
            ends[number] = axis_ends[transfer.axis] = begin + taken
            insort(busy, (begin, begin + taken))
    # a transfer that is not waited for delays the next step
    left = 0.0 if overlaps else sum(ends.values())
    return Replay(now + left, compute_factor * trace.seconds, slowed, dict(shares), dict(waits))


def _computed(now: float, own: float, busy: Iterable[tuple[float, float]], slowdown: float) -> float:
    """Returns the end of ``own`` seconds of computation that begin ``now``; in ``busy`` times they are longer."""
    for begin, end in busy:
        free = max(0.0, begin - now)
        if own <= free:
            return now + own
        own, now = own - free, max(now, begin)
        while_busy = max(0.0, end - now) / slowdown
        if own <= while_busy:
            return now + own * slowdown
        own, now = own - while_busy, max(now, end)
    return now + own
