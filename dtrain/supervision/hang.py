"""Decides from the records of a host's ranks whether they hang, and which of them is at fault. Imports no torch."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from dtrain.distributed.processes import name_ranks
from dtrain.distributed.progress import Phase, ProgressRecord
from dtrain.supervision.links import HostFailure, RanksOfHost

CRASH_S = 1.2
"""Seconds that ranks have to notice that another one has ended."""
END_S = 10.0
"""Seconds that ranks at the end of their run have for it, because they close files and connections first."""
OTHER_HOSTS_S = 5.0
"""Seconds by which a host waits longer than the one that has the rank at fault, which ends the run by name."""
STOPPED = "T"  # state in /proc/<pid>/stat

_NUM_SPANS = 101  # of a phase, whose median counts
_FACTOR = 10  # times that median
_OF_A_STEP = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)
_ENTRY = re.compile(r"(\w+)\((.*), \d+ x \w+\)")


@dataclass(frozen=True)
class RankState:
    """A rank as its watcher sees it.

    Attributes:
        rank: its number.
        pid: its process.
        record: its progress.
        unchanged_s: seconds since the record changed.
        state: letter of ``/proc/<pid>/stat``; empty if the process has ended.
        ended_s: seconds since the process ended.
    """

    rank: int
    pid: int
    record: ProgressRecord
    unchanged_s: float
    state: str = "S"
    ended_s: float = 0.0

    @property
    def is_active(self) -> bool:
        """Whether the rank has still to end its run."""
        return bool(self.state) and not self.record.has_ended

    @property
    def has_crashed(self) -> bool:
        """Whether the process ended before the run did."""
        return not self.state and not self.record.has_ended


@dataclass(frozen=True)
class Limit:
    """Seconds after which a rank hangs, and what sets them."""

    seconds: float
    why: str

    def __str__(self) -> str:
        return f"{round(self.seconds, 1):g} s ({self.why})"


@dataclass
class PhaseLimits:
    """Seconds after which a rank whose record does not change hangs, by what it does.

    Args:
        step_s: in a step or an evaluation, between two calls of the engine or two waits for other ranks.
        start_s: until the end of the first step, and in a compilation.
        save_s: in a save or a load. At the end of the run, or if both apply, the longer of the two counts.
    """

    step_s: float
    start_s: float
    save_s: float
    _spans: dict[Phase, deque[float]] = field(default_factory=dict)

    def learn(self, record: ProgressRecord, seconds: float) -> None:
        """Takes the time that a rank has spent in ``record``: a phase that always takes long is no hang."""
        if record.num_steps:
            self._spans.setdefault(record.phase, deque(maxlen=_NUM_SPANS)).append(seconds)

    def of(self, record: ProgressRecord) -> float:
        return self.limit(record).seconds

    def limit(self, record: ProgressRecord) -> Limit:
        is_start = record.phase in (Phase.START, Phase.COMPILE, Phase.END) or not record.num_steps
        is_save = record.phase in (Phase.SAVE, Phase.LOAD, Phase.END)
        step, start, save = self._settings
        limits = [limit for limit, applies in ((start, is_start), (save, is_save)) if applies] or [step]
        if record.num_steps and (spans := self._spans.get(record.phase)):
            why = f"{_FACTOR} x the median of '{record.phase.name.lower()}'"
            limits.append(Limit(_FACTOR * median(spans), why))
        return max(limits, key=lambda limit: limit.seconds)

    @property
    def of_heartbeats(self) -> Limit:
        """The limit of the silence of another host's watcher."""
        return self._settings[0]

    @property
    def of_other_hosts(self) -> Limit:
        """The limit of ranks that wait for another host, all of whose limits have passed by then."""
        longest = max(self._settings, key=lambda limit: limit.seconds)
        return Limit(longest.seconds + OTHER_HOSTS_S, f"{longest.why} + {OTHER_HOSTS_S:g} s for other hosts")

    @property
    def _settings(self) -> tuple[Limit, Limit, Limit]:
        return (
            Limit(self.step_s, "supervise.limit_s"),
            Limit(self.start_s, "supervise.start_s"),
            Limit(self.save_s, "supervise.save_s"),
        )


@dataclass(frozen=True)
class Hang:
    """Ranks at fault, and one line that says why.

    Attributes:
        culprits: the ranks at fault; all of them if the records do not tell.
        message: one line.
        is_crash: whether their processes have ended, while other ranks still run and have not noticed.
        is_reported: whether the other hosts know of it.
    """

    culprits: tuple[int, ...]
    message: str
    is_crash: bool = False
    is_reported: bool = False


def find_hang(ranks: Sequence[RankState], limits: PhaseLimits, *, has_other_hosts: bool) -> Hang | None:
    """Returns the hang of these ranks, or None.

    A rank that waits for others is not at fault while one of them does not wait. That one may take as long as its own
    phase allows.

    Args:
        ranks: those of this host.
        limits: see there.
        has_other_hosts: whether there are ranks elsewhere.
    """
    active = [rank for rank in ranks if rank.is_active]
    crashed = [rank for rank in ranks if rank.has_crashed]
    if crashed and min(rank.ended_s for rank in crashed) > CRASH_S:
        unaware = _unaware(active)
        if unaware:
            return Hang(_numbers(crashed), _joined(*map(_group, (crashed, unaware))), is_crash=True)
    late = [rank for rank in active if rank.unchanged_s > limits.of(rank.record)]
    stopped = [rank for rank in late if rank.state == STOPPED]
    if stopped:
        return _hang(stopped, ranks, _limits_of(stopped, limits))
    running = [rank for rank in active if not rank.record.is_waiting]
    if running:
        culprits = [rank for rank in late if not rank.record.is_waiting]
        if len(culprits) == len(active):  # libraries' own collectives are not in the records
            culprits = _furthest_behind(culprits)
        return _hang(culprits, ranks, _limits_of(culprits, limits)) if culprits else None
    if not active or len(late) < len(active):
        return None
    if has_other_hosts and min(rank.unchanged_s for rank in active) <= limits.of_other_hosts.seconds:
        return None
    first = min(rank.record.entered for rank in active)
    culprits = [rank for rank in active if rank.record.entered == first]
    passed = [limits.of_other_hosts] if has_other_hosts else _limits_of(culprits, limits)
    if len(culprits) < len(active):
        return _hang(culprits, ranks, passed)
    why = " for ranks of other hosts" if has_other_hosts else " though no rank of the run does anything else"
    return _hang(culprits, ranks, passed, why)


def find_failure_elsewhere(
    ranks: Sequence[RankState], reports: Sequence[HostFailure], silent: Sequence[RanksOfHost], limit: Limit, now: float
) -> Hang | None:
    """Returns the failure of another host that has to end the ranks of this one, or None.

    Args:
        ranks: those of this host.
        reports: of other hosts.
        silent: hosts without a heartbeat for longer than ``limit``. They count if all ranks here have waited for as
            long, because the network of the watchers alone may be down. A rank that does not wait may take as long as
            its phase allows, and is then a hang of this host: see ``with_silent_hosts``.
        limit: see ``silent``.
        now: by the clock of the reports.
    """
    active = [rank for rank in ranks if rank.is_active]
    for report in reports:
        affected = active
        if report.is_crash:
            affected = _unaware(active) if now - report.at > CRASH_S else []
        if affected:
            message = _joined(report.text, _group(affected))
            return Hang(report.culprits, message, is_crash=report.is_crash, is_reported=True)
    waiting = [rank for rank in active if rank.record.is_waiting and rank.unchanged_s > limit.seconds]
    if not silent or not active or len(waiting) < len(active):
        return None
    return Hang(_ranks_of(silent), _joined(_silence(silent), _group(active), f"the limit is {limit}"))


def with_silent_hosts(hang: Hang, silent: Sequence[RanksOfHost], endings: Sequence[str]) -> Hang:
    """Returns ``hang`` of ranks that may wait for other hosts in a library, which is not in their records.

    Args:
        hang: of ranks of this host.
        silent: hosts without heartbeats.
        endings: see ``dtrain.supervision.links.HostLinks.endings``; alone they are no fault of the ranks there.
    """
    if hang.is_crash or not (silent or endings):
        return hang
    silence = _silence(silent) if silent else ""
    return Hang(hang.culprits + _ranks_of(silent), _joined(hang.message, silence, *endings))


def _ranks_of(hosts: Sequence[RanksOfHost]) -> tuple[int, ...]:
    return tuple(rank for host in hosts for rank in host.ranks)


def _silence(hosts: Sequence[RanksOfHost]) -> str:
    verb = "sends" if len(hosts) == 1 else "send"
    return f"{', '.join(map(str, hosts))} {verb} no heartbeat: the host or its network is down"


def describe_crash(ranks: Sequence[RankState]) -> Hang | None:
    """Returns the crash of ranks, whether or not the others have noticed, or None."""
    crashed = [rank for rank in ranks if rank.has_crashed]
    return Hang(_numbers(crashed), _group(crashed), is_crash=True) if crashed else None


def _unaware(active: Sequence[RankState]) -> list[RankState]:
    """Returns the ranks that have not noticed a crash; those at the end of their run have some time."""
    return [rank for rank in active if rank.record.phase != Phase.END or rank.unchanged_s > END_S]


def _limits_of(ranks: Sequence[RankState], limits: PhaseLimits) -> list[Limit]:
    """Returns the limits that the ranks have passed, each once."""
    return [*dict.fromkeys(limits.limit(rank.record) for rank in ranks)]


def _furthest_behind(ranks: Sequence[RankState]) -> list[RankState]:
    """Returns the ranks that have come least far, if all of them take the same way; else all."""
    if any(rank.record.phase not in _OF_A_STEP for rank in ranks):
        return [*ranks]

    def progress(rank: RankState) -> tuple[int, int, int]:
        # not the number of changes: compilations change the record too, and differ between ranks
        return rank.record.step, rank.record.entered, rank.record.phase

    least = min(map(progress, ranks))
    return [rank for rank in ranks if progress(rank) == least]


def _hang(culprits: Sequence[RankState], ranks: Sequence[RankState], passed: Sequence[Limit], why: str = "") -> Hang:
    others = _group([rank for rank in ranks if rank not in culprits])
    limit = f"the limit{' is' if len(passed) == 1 else 's are'} {', '.join(map(str, passed))}"
    return Hang(_numbers(culprits), _joined(_group(culprits) + why, others, limit))


# -- sentences ---------------------------------------------------------------------------------------------------------


def _numbers(ranks: Iterable[RankState]) -> tuple[int, ...]:
    return tuple(rank.rank for rank in ranks)


def _joined(*parts: str) -> str:
    return "; ".join(filter(None, parts))


def _group(ranks: Sequence[RankState]) -> str:
    """Describes the ranks, those that do the same together."""
    parts: dict[tuple[str, str], list[RankState]] = {}
    for rank in ranks:
        parts.setdefault(_doing(rank), []).append(rank)
    return "; ".join(
        f"{name_ranks(_numbers(group))} {many if len(group) > 1 else one}"
        + ("" if group[0].record.has_ended or not group[0].state else _since(group))
        for (one, many), group in parts.items()
    )


def _since(group: Sequence[RankState]) -> str:
    return f" since {max(rank.unchanged_s for rank in group):.0f} s"


def _doing(rank: RankState) -> tuple[str, str]:
    """Returns what a rank does, for one and for several."""
    record = rank.record
    if record.has_ended:
        return "has finished", "have finished"
    if not rank.state:
        return f"(process {rank.pid}) has ended", "have ended"
    if record.is_waiting:
        where = f"in {_collective(record.label)} (#{record.entered})"
        if rank.state != STOPPED:
            return f"waits {where}", f"wait {where}"
    else:
        where = f"in '{record.phase.name.lower()}'"
        if record.phase in _OF_A_STEP:
            where += f" of step {record.step + 1}"  # as in metrics.jsonl
        elif record.phase not in (Phase.START, Phase.LOAD):
            where += f" after step {record.step}"
    if rank.state == STOPPED:
        return f"is stopped (SIGSTOP) {where}", f"are stopped (SIGSTOP) {where}"
    return f"is {where}", f"are {where}"


def _collective(label: str) -> str:
    found = _ENTRY.fullmatch(label)
    return f"{found[1]} of '{found[2]}'" if found else label
