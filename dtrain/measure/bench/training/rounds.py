"""Measures cases round by round, so that noise of the machine meets all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TypeVar

from dtrain.config.tool_schema import SuiteConfig
from dtrain.distributed.logging import logger
from dtrain.errors import BenchError
from dtrain.measure.bench.records import BenchmarkCase, CaseResult, FailedCase, TimedSteps
from dtrain.measure.bench.training.processes import CaseProcesses
from dtrain.telemetry.host import memory_left

Value = TypeVar("Value")

_LEAST_MEMORY_LEFT = 0.1  # with less, the system may kill any process, also those of other programs


def run_rounds(cases: Sequence[BenchmarkCase], config: SuiteConfig) -> tuple[list[CaseResult], list[FailedCase]]:
    """Starts all cases one after the other, then times some steps of each in ``config.bench.rounds`` rounds.

    Returns:
        The results of the cases that ran to the end, and the cases that failed; a failure does not stop the others.

    Raises:
        BenchError: no case ran to the end.
    """
    bench = config.bench
    failures: list[FailedCase] = []
    with ExitStack() as stack:
        running = [stack.enter_context(CaseProcesses(case, config)) for case in cases]

        def each(act: Callable[[CaseProcesses], Value]) -> dict[CaseProcesses, Value]:
            values = {}
            for processes in list(running):
                try:
                    values[processes] = act(processes)
                except BenchError as error:
                    logger.warning("did not run: %s", error)
                    processes.end()
                    running.remove(processes)
                    failures.append(FailedCase(processes.case, str(error)))
            return values

        starts = each(lambda processes: _start(processes, bench.warmup_steps))
        rounds: list[dict[CaseProcesses, TimedSteps]] = []
        for number in range(bench.rounds):
            rounds.append(each(lambda processes: processes.take_steps(bench.steps)))
            best = "  ".join(f"{key.case.name} {min(timed.step_ms):.0f}" for key, timed in rounds[-1].items())
            logger.info("round %d/%d, best ms: %s", number + 1, bench.rounds, best)
        footprints = each(CaseProcesses.footprint)
        for processes in running:
            processes.request_end()  # all at once, so that ending takes as long as the slowest
    if not running:
        raise BenchError(f"no case ran; {failures[0].reason}")
    results = [
        CaseResult(key.case, *starts[key], [of_round[key] for of_round in rounds], footprints[key]) for key in running
    ]
    return results, failures


def _start(processes: CaseProcesses, warmup_steps: int) -> tuple[float, TimedSteps]:
    first_step_s = processes.start()
    warmup = processes.take_steps(warmup_steps)
    if (left := memory_left()) < _LEAST_MEMORY_LEFT:
        raise BenchError(
            f"{processes.case.name}: only {left:.0%} of the memory is left; all cases hold theirs at once, so measure "
            "fewer (bench.peers, bench.stages) or take a smaller model"
        )
    logger.info("%s: first step after %.1f s", processes.case.name, first_step_s)
    return first_step_s, warmup
