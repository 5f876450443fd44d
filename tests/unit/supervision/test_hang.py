"""Which ranks hang, and which of them is at fault, by their records."""

from __future__ import annotations

import itertools

import pytest

from dtrain.distributed.processes import name_ranks
from dtrain.distributed.progress import Phase, ProgressRecord
from dtrain.supervision.hang import CRASH_S, END_S, OTHER_HOSTS_S, PhaseLimits, RankState, find_hang

LABEL = "reduce(blocks.7, 8 x float32)"


def limits() -> PhaseLimits:
    return PhaseLimits(60.0, 600.0, 300.0)


def running(rank: int, phase: Phase, since: float, state: str = "S", changes: int = 9, number: int = 1840) -> RankState:
    return RankState(rank, 100 + rank, ProgressRecord(119, phase, changes, number, number, LABEL), since, state)


def waiting(rank: int, since: float, number: int = 1841, phase: Phase = Phase.BACKWARD, state: str = "S") -> RankState:
    return RankState(rank, 100 + rank, ProgressRecord(119, phase, 9, number, number - 1, LABEL), since, state)


def ended(rank: int, since: float, *, finished: bool = False) -> RankState:
    record = ProgressRecord(119, Phase.BACKWARD, 9, 1840, 1840, LABEL, has_ended=finished)
    return RankState(rank, 100 + rank, record, since, "", since)


STEP, START, SAVE = "60 s (supervise.limit_s)", "600 s (supervise.start_s)", "300 s (supervise.save_s)"
BLOCKED = "in reduce of 'blocks.7' (#1841) since 61 s"
NOBODY = "though no rank of the run does anything else"
STOPPED = "is stopped (SIGSTOP)"
CASES: dict[str, tuple[list[RankState], str, str]] = {
    "a loader": ([waiting(0, 61), waiting(1, 61), waiting(2, 61), running(3, Phase.DATA, 61.4)], STEP,
        f"rank 3 is in 'data' of step 120 since 61 s; ranks 0-2 wait {BLOCKED}"),
    "a stopped rank": ([running(0, Phase.FORWARD, 61, state="T"), waiting(1, 61)], STEP,
        f"rank 0 {STOPPED} in 'forward' of step 120 since 61 s; rank 1 waits {BLOCKED}"),
    "stopped in a wait": ([waiting(0, 61, state="T"), waiting(1, 61)], STEP,
        f"rank 0 {STOPPED} {BLOCKED}; rank 1 waits {BLOCKED}"),
    "stopped while another compiles": ([running(0, Phase.COMPILE, 70), waiting(1, 61, state="T"), waiting(2, 61)], STEP,
        f"rank 1 {STOPPED} {BLOCKED}; rank 0 is in 'compile' after step 119 since 70 s; rank 2 waits {BLOCKED}"),
    "all stopped": ([running(0, Phase.UPDATE, 61, state="T"), running(1, Phase.UPDATE, 62, state="T")], STEP,
        "ranks 0-1 are stopped (SIGSTOP) in 'update' of step 120 since 62 s"),
    "the lowest collective": ([waiting(0, 61, number=12), waiting(1, 61, number=11), waiting(2, 61, number=12)], STEP,
        f"rank 1 waits {BLOCKED}; ranks 0, 2 wait {BLOCKED}".replace("#1841", "#11", 1).replace("#1841", "#12")),
    "all in one collective": ([waiting(0, 61), waiting(1, 61)], STEP, f"ranks 0-1 wait {BLOCKED} {NOBODY}"),
    "no recorded waits, one behind": ([running(0, Phase.BACKWARD, 61), running(1, Phase.FORWARD, 61)], STEP,
        "rank 1 is in 'forward' of step 120 since 61 s; rank 0 is in 'backward' of step 120 since 61 s"),
    "one behind that has compiled more often": (
        [running(0, Phase.BACKWARD, 61, number=8, changes=20), running(1, Phase.BACKWARD, 61, number=7, changes=29)],
        STEP, "rank 1 is in 'backward' of step 120 since 61 s; rank 0 is in 'backward' of step 120 since 61 s"),
    "the same in an earlier phase": (
        [running(0, Phase.BACKWARD, 61, changes=20), running(1, Phase.FORWARD, 61, changes=29)], STEP,
        "rank 1 is in 'forward' of step 120 since 61 s; rank 0 is in 'backward' of step 120 since 61 s"),
    "no recorded waits, nobody behind": ([running(0, Phase.BACKWARD, 61), running(1, Phase.BACKWARD, 61)], STEP,
        "ranks 0-1 are in 'backward' of step 120 since 61 s"),
    "a save of all": ([running(0, Phase.SAVE, 301), running(1, Phase.SAVE, 301)], SAVE,
        "ranks 0-1 are in 'save' after step 119 since 301 s"),
    "an evaluation": ([running(0, Phase.EVALUATION, 61), waiting(1, 61, phase=Phase.EVALUATION)], STEP,
        f"rank 0 is in 'evaluation' after step 119 since 61 s; rank 1 waits {BLOCKED}"),
    "the start": ([running(0, Phase.START, 601)], START, "rank 0 is in 'start' since 601 s"),
    "a crash": ([ended(0, CRASH_S + 0.1), running(1, Phase.DATA, 3)], "",
        "rank 0 (process 100) has ended; rank 1 is in 'data' of step 120 since 3 s"),
    "a crash before a hang": ([ended(0, 1), running(1, Phase.END, 601)], START,
        "rank 1 is in 'end' after step 119 since 601 s; rank 0 (process 100) has ended"),
    "a crash while another ends": ([ended(0, CRASH_S + 0.1), running(1, Phase.END, END_S + 0.1)], "",
        "rank 0 (process 100) has ended; rank 1 is in 'end' after step 119 since 10 s"),
    "a finished rank": ([ended(0, 70, finished=True), waiting(1, 61)], STEP,
        f"rank 1 waits {BLOCKED} {NOBODY}; rank 0 has finished"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_rank_at_fault(case: str) -> None:
    ranks, limit, message = CASES[case]
    hang = find_hang(ranks, limits(), has_other_hosts=False)
    assert hang is not None
    assert hang.message == message + (limit and f"; the limit is {limit}")
    assert message.startswith(name_ranks(hang.culprits))
    assert hang.is_crash == (not limit)


def test_each_limit_that_was_passed_is_named_once() -> None:
    phases = (Phase.SAVE, Phase.DATA, Phase.FORWARD)
    stopped = [running(rank, phase, 301, state="T") for rank, phase in enumerate(phases)]
    hang = find_hang(stopped, limits(), has_other_hosts=False)
    assert hang is not None
    assert hang.message.endswith(f"; the limits are {SAVE}, {STEP}")


def test_no_rank_is_behind_one_that_is_out_of_the_step() -> None:
    hang = find_hang([running(0, Phase.SAVE, 301), running(1, Phase.FORWARD, 61)], limits(), has_other_hosts=False)
    assert hang is not None
    assert hang.culprits == (0, 1)


NO_HANG = {
    "a slow step": [running(0, Phase.FORWARD, 59), waiting(1, 59)],
    "a compilation": [running(0, Phase.COMPILE, 599), waiting(1, 599)],
    "a save of one rank": [running(0, Phase.SAVE, 299), waiting(1, 299, phase=Phase.SAVE)],
    "one that continues": [running(0, Phase.DATA, 1), waiting(1, 599)],
    "a stopped rank before its time": [running(0, Phase.DATA, 30, state="T"), waiting(1, 30)],
    "a crash that is not noticed yet": [ended(0, CRASH_S - 0.1), waiting(1, 1)],
    "a crash that is noticed": [ended(0, 30), running(1, Phase.END, END_S - 0.1)],
    "a run that is over": [ended(0, 700, finished=True), ended(1, 700, finished=True)],
    "all crashed": [ended(0, 700), ended(1, 700)],
}


@pytest.mark.parametrize("case", NO_HANG)
def test_no_hang(case: str) -> None:
    assert find_hang(NO_HANG[case], limits(), has_other_hosts=False) is None


def test_a_host_whose_ranks_wait_for_another_one_lets_that_one_speak_first() -> None:
    for since in (61, 599, 600 + OTHER_HOSTS_S):
        assert find_hang([waiting(0, since), waiting(1, since)], limits(), has_other_hosts=True) is None
    hang = find_hang([waiting(0, 606), waiting(1, 606)], limits(), has_other_hosts=True)
    assert hang is not None
    assert hang.message == (
        "ranks 0-1 wait in reduce of 'blocks.7' (#1841) since 606 s for ranks of other hosts; "
        "the limit is 605 s (supervise.start_s + 5 s for other hosts)"
    )
    hang = find_hang([waiting(0, 61), running(1, Phase.DATA, 61)], limits(), has_other_hosts=True)
    assert hang is not None
    assert hang.culprits == (1,)


def test_every_combination_of_three_ranks() -> None:
    """Against the rule in words: stopped ranks, else late ones that do not wait, else the last in the order."""
    kinds = {
        "busy": lambda rank: running(rank, Phase.FORWARD, 10, number=rank),
        "late": lambda rank: running(rank, Phase.FORWARD, 61, number=rank),
        "waits": lambda rank: waiting(rank, 61, number=50 + rank),
        "stopped": lambda rank: running(rank, Phase.FORWARD, 61, state="T"),
        "finished": lambda rank: ended(rank, 61, finished=True),
    }
    for combination in itertools.product(kinds, repeat=3):
        ranks = [kinds[kind](rank) for rank, kind in enumerate(combination)]
        by_kind = {kind: tuple(rank for rank in range(3) if combination[rank] == kind) for kind in kinds}
        if by_kind["stopped"]:
            expected = by_kind["stopped"]
        elif by_kind["late"]:
            alone = not by_kind["busy"] and not by_kind["waits"]
            expected = by_kind["late"][:1] if alone else by_kind["late"]
        elif by_kind["busy"]:
            expected = ()
        else:
            expected = by_kind["waits"][:1]
        hang = find_hang(ranks, limits(), has_other_hosts=False)
        assert (hang.culprits if hang else ()) == expected, combination


@pytest.mark.parametrize("phase", Phase)
def test_each_phase_has_its_limit(phase: Phase) -> None:
    first, later = (str(limits().limit(ProgressRecord(0, phase, 1, 0, 0, "", steps))) for steps in (0, 5))
    assert first == START
    if phase in (Phase.START, Phase.COMPILE, Phase.END):
        assert later == START
    else:
        assert later == (SAVE if phase in (Phase.SAVE, Phase.LOAD) else STEP)


def test_at_the_end_the_longer_limit_counts() -> None:
    record = ProgressRecord(9, Phase.END, 1, 0, 0, "")
    assert str(PhaseLimits(60, 10, 20).limit(record)) == "20 s (supervise.save_s)"
    assert str(PhaseLimits(60, 20, 10).limit(record)) == "20 s (supervise.start_s)"


def test_a_phase_that_always_takes_long_has_a_longer_limit() -> None:
    known, slow = limits(), ProgressRecord(5, Phase.FORWARD, 1, 0, 0, "")
    first = ProgressRecord(0, Phase.FORWARD, 1, 0, 0, "", num_steps=0)
    for _ in range(9):
        known.learn(first, 1000.0)  # compiles
    assert known.of(slow) == 60
    for seconds in (20.0, 30.0, 40.0):
        known.learn(slow, seconds)
    assert known.of(slow) == 300
    assert str(known.limit(slow)) == "300 s (10 x the median of 'forward')"
    assert known.of(ProgressRecord(5, Phase.BACKWARD, 1, 0, 0, "")) == 60
    for _ in range(1000):
        known.learn(slow, 0.1)
    assert str(known.limit(slow)) == STEP
