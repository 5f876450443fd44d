"""A rank's step, in which transfers take time and slow the computation that they overlap with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """What one rank does in a step, if every transfer takes no time.

    Attributes:
        seconds: the whole.
        moments: seconds after the beginning, number of a transfer, and whether the rank waits for it; else it starts.
        transfers: by number.
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
    """A step of one rank.

    Attributes:
        seconds: the whole.
        compute: of the rank alone.
        slowed: by which transfers make the computation longer.
        shares: transfers by purpose and axis.
        waits: seconds for which the rank waits, by label.
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
    ends: dict[int, float] = {}
    queue = _Queues()
    now = last = slowed = 0.0
    for seconds, number, is_wait in trace.moments:
        own = compute_factor * (seconds - last)
        last = seconds
        after = queue.compute(now, own, slowdown)
        slowed += after - now - own
        now = after
        transfer = trace.transfers[number]
        share = shares[label_group(transfer), transfer.axis]
        if not is_wait:
            taken = seconds_of(transfer)
            share.count += 1
            share.nbytes += transfer.nbytes
            share.seconds += taken
            ends[number] = queue.start(transfer.axis, now, taken) if overlaps else taken
            continue
        end = ends.pop(number, None)
        if end is None:
            continue
        waited = max(0.0, end - now) if overlaps else end
        share.exposed += waited
        waits[transfer.label] += waited
        now += waited
    own = compute_factor * (trace.seconds - last)
    after = queue.compute(now, own, slowdown)
    slowed += after - now - own
    # a transfer that is not waited for delays the next step
    left = 0.0 if overlaps else sum(ends.values())
    return Replay(after + left, compute_factor * trace.seconds, slowed, dict(shares), dict(waits))


class _Queues:
    """Transfers in flight, by axis; each axis runs one at a time."""

    def __init__(self) -> None:
        self._runs: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def start(self, axis: str, now: float, taken: float) -> float:
        """Returns the end of a transfer that is started ``now``."""
        runs = self._runs[axis]
        begin = max(now, runs[-1][1]) if runs else now
        if runs and begin == runs[-1][1]:
            runs[-1] = runs[-1][0], begin + taken
        else:
            runs.append((begin, begin + taken))
        return begin + taken

    def compute(self, now: float, own: float, slowdown: float) -> float:
        """Returns the end of ``own`` seconds of computation that begin ``now``."""
        for begin, end in self._busy_after(now):
            free = max(0.0, begin - now)
            if own <= free:
                return now + own
            own -= free
            now = max(now, begin)
            while_busy = (end - now) / slowdown
            if own <= while_busy:
                return now + own * slowdown
            own -= while_busy
            now = end
        return now + own

    def _busy_after(self, now: float) -> Iterator[tuple[float, float]]:
        """Yields the times in which any transfer runs, in order, without overlap."""
        for runs in self._runs.values():
            while len(runs) > 1 and runs[0][1] <= now:
                runs.pop(0)
        reached = now
        for begin, end in sorted(run for runs in self._runs.values() for run in runs):
            if end > reached:
                yield max(begin, reached), end
                reached = end
