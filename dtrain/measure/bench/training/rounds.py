"""Measures cases round by round, so that noise of the machine meets all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from dtrain.config.tool_schema import BenchConfig, TrainingSuite
from dtrain.distributed.logging import logger
from dtrain.errors import BenchError
from dtrain.measure.bench.records import BenchmarkCase, CaseResult, FailedCase
from dtrain.measure.bench.training.processes import CaseProcesses
from dtrain.telemetry.host import memory_left

_LEAST_MEMORY_LEFT = 0.1  # with less, the system may kill any process, also those of other programs


@dataclass(frozen=True)
class MeasuredCases:
    """What is measured so far: results by case, and the cases that failed; one that fails late keeps its rounds."""

    results: dict[str, CaseResult] = field(default_factory=dict)
    failures: list[FailedCase] = field(default_factory=list)

    @property
    def cases(self) -> list[CaseResult]:
        return list(self.results.values())


def run_rounds(cases: Sequence[BenchmarkCase], config: TrainingSuite[BenchConfig]) -> Iterator[MeasuredCases]:
    """Times some steps of each case in ``config.bench.rounds`` rounds.

    With ``bench.resident`` all cases start before the first round. Else a round of a case is a start of its own, so
    that one model is in memory at a time.

    Yields:
        The same object after each start, after each round, and at the end. A failure does not stop the other cases.

    Raises:
        BenchError: no case has a round.
    """
    measured = MeasuredCases()
    yield from (_resident if config.bench.resident else _one_by_one)(cases, config, measured)
    if not any(result.rounds for result in measured.cases):
        raise BenchError(f"no case ran; {measured.failures[0].reason}")


def _resident(
    cases: Sequence[BenchmarkCase], config: TrainingSuite[BenchConfig], measured: MeasuredCases
) -> Iterator[MeasuredCases]:
    bench = config.bench
    with ExitStack() as stack:
        running = []
        for case in cases:
            processes = stack.enter_context(CaseProcesses(case, config))
            if _try(_start, processes, measured):
                running.append(processes)
            yield measured
        for number in range(bench.rounds):
            running = [processes for processes in running if _try(_take_round, processes, measured)]
            results = (measured.results[processes.case.name] for processes in running)
            best = "  ".join(f"{result.case.name} {min(result.rounds[-1].step_ms):.0f}" for result in results)
            logger.info("round %d/%d, best ms: %s", number + 1, bench.rounds, best)
            yield measured
        running = [processes for processes in running if _try(_finish, processes, measured)]
        for processes in running:
            processes.request_end()  # all at once, so that ending takes as long as the slowest
    yield measured


def _one_by_one(
    cases: Sequence[BenchmarkCase], config: TrainingSuite[BenchConfig], measured: MeasuredCases
) -> Iterator[MeasuredCases]:
    failed: set[str] = set()
    for number in range(config.bench.rounds):
        for case in [case for case in cases if case.name not in failed]:
            known = measured.results.get(case.name)
            with CaseProcesses(case, config, None if known is None else known.micro_batch) as processes:
                if not all(_try(act, processes, measured) for act in (_start, _take_round, _finish)):
                    failed.add(case.name)
                    continue
            best = min(measured.results[case.name].rounds[-1].step_ms)
            logger.info("round %d/%d, %s: best ms %.0f", number + 1, config.bench.rounds, case.name, best)
            yield measured


def _try(
    act: Callable[[CaseProcesses, MeasuredCases], None], processes: CaseProcesses, measured: MeasuredCases
) -> bool:
    case = processes.case
    try:
        act(processes, measured)
    except BenchError as error:
        logger.warning("did not run: %s", error)
        processes.end()
        measured.failures.append(FailedCase(case, str(error)))
        if case.name in measured.results and not measured.results[case.name].rounds:
            del measured.results[case.name]
        return False
    return True


def _start(processes: CaseProcesses, measured: MeasuredCases) -> None:
    result, name = processes.start(), processes.case.name
    if (left := memory_left()) < _LEAST_MEMORY_LEFT:
        raise BenchError(
            f"{name}: only {left:.0%} of the memory is left; all cases hold theirs at once, so measure fewer "
            "(bench.peers, bench.stages), take a smaller model, or set bench.resident=false"
        )
    logger.info("%s: first step after %.1f s", name, result.first_step_s)
    measured.results.setdefault(name, result)


def _take_round(processes: CaseProcesses, measured: MeasuredCases) -> None:
    result = measured.results[processes.case.name]
    result.rounds.append(processes.take_steps(processes.config.bench.steps))


def _finish(processes: CaseProcesses, measured: MeasuredCases) -> None:
    name = processes.case.name
    measured.results[name] = replace(measured.results[name], footprint=processes.footprint(last=True))
