"""Contenders that take turns: each is a group of processes which lives through the whole run."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, TypeVar

from dtrain.config.dump import config_to_dict, from_plain
from dtrain.config.schema import SuiteConfig
from dtrain.distributed.logging import logger
from dtrain.errors import BenchError
from dtrain.tools.bench.records import Absence, Assignment, Contender, Entry, Footprint, Turn
from dtrain.tools.host import memory_left
from dtrain.tools.ranks import environment, kill_group

Answer = TypeVar("Answer")

_START_S = 300.0  # a peer may compile its extensions in its first start
_SILENCE_S = 900.0  # a rank that says nothing for so long hangs
_GOODBYE_S = 10.0
_LEAST_MEMORY_LEFT = 0.1  # beyond it the system may kill any process, and not only ours


class Entrant:
    """The processes of one contender; use as a context manager, which ends them.

    Args:
        contender: who.
        config: of the suite.
    """

    def __init__(self, contender: Contender, config: SuiteConfig) -> None:
        self.contender = contender
        self._stack = ExitStack()
        self._folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="dtrain-bench-"))
        self._processes: list[subprocess.Popen[str]] = []
        self._logs: list[IO[str]] = []
        self._config = config_to_dict(config)
        self._threads = config.bench.threads_per_rank

    def __enter__(self) -> Entrant:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Ends the processes and waits for that; more than once does no harm."""
        self.dismiss()
        for process in self._processes:
            try:
                process.wait(_GOODBYE_S)
            except subprocess.TimeoutExpired:
                kill_group(process)
                process.wait()
            _not_none(process.stdout).close()
        self._stack.close()

    def dismiss(self) -> None:
        """Tells the processes to end."""
        for process in self._processes:
            with suppress(BrokenPipeError):  # it is gone already
                _not_none(process.stdin).close()

    def start(self) -> float:
        """Starts the processes; returns the seconds from there to the end of the first step.

        Raises:
            BenchError: a process failed; the message has its last words.
        """
        begin = time.perf_counter()
        for _ in range(self.contender.ranks):
            log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed by the stack
            self._stack.enter_context(log)
            self._logs.append(log)
            process = subprocess.Popen(
                [sys.executable, "-m", "dtrain.tools.bench.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(self._threads),
                text=True,
                start_new_session=True,  # a process group of its own, so that its compilers end with it
            )
            self._processes.append(process)
        store = str(Path(self._folder, "store"))
        for rank in range(self.contender.ranks):
            self._send(rank, asdict(Assignment(self.contender, rank, store, self._config)))
        self._ask({"steps": 1}, _START_S)
        return time.perf_counter() - begin

    def turn(self, steps: int) -> Turn:
        """Takes ``steps`` steps."""
        load = os.getloadavg()[0]
        if not steps:
            return Turn([], [], load)
        answers = self._ask({"steps": steps})
        step_ms = [max(times) for times in zip(*(answer["step_ms"] for answer in answers), strict=True)]
        losses = [sum(row) / len(row) for row in zip(*(answer["losses"] for answer in answers), strict=True)]
        cpu_ms = [sum(times) for times in zip(*(answer["cpu_ms"] for answer in answers), strict=True)]
        parts_ms = {name: [answer["parts_ms"][name] for answer in answers] for name in answers[0]["parts_ms"]}
        return Turn(step_ms, losses, load, cpu_ms, parts_ms)

    def footprint(self) -> Footprint:
        """Of the rank that holds the most."""
        ranks = [from_plain(Footprint, answer) for answer in self._ask({"footprint": True})]
        most = max(ranks, key=lambda rank: sum(rank.state.values()))
        devices = [rank.peak_device for rank in ranks if rank.peak_device is not None]
        return Footprint(
            num_parameters=most.num_parameters,
            state=most.state,
            formula=most.formula,
            peak_rss=max(rank.peak_rss for rank in ranks),
            peak_device=max(devices, default=None),
            device=most.device,
            linears=most.linears,
        )

    def _ask(self, order: dict[str, Any], limit_s: float = _SILENCE_S) -> list[dict[str, Any]]:
        for rank in range(len(self._processes)):
            self._send(rank, order)
        waiting = {_not_none(process.stdout): rank for rank, process in enumerate(self._processes)}
        answers: dict[int, dict[str, Any]] = {}
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], limit_s)
            if not ready:
                raise BenchError(f"{self.contender.name}: no answer for {limit_s:.0f} s; a rank hangs")
            for pipe in ready:
                rank = waiting.pop(pipe)
                line = pipe.readline()  # a rank answers an order with one line, so nothing stays in the buffer
                if not line:
                    raise self._failure(rank)
                answers[rank] = json.loads(line)
                if "failure" in answers[rank]:
                    raise BenchError(f"{self.contender.name}: rank {rank} failed: {answers[rank]['failure']}")
        return [answers[rank] for rank in range(len(self._processes))]

    def _send(self, rank: int, order: dict[str, Any]) -> None:
        pipe = _not_none(self._processes[rank].stdin)
        try:
            pipe.write(json.dumps(order) + "\n")
            pipe.flush()
        except BrokenPipeError:
            raise self._failure(rank) from None

    def _failure(self, rank: int) -> BenchError:
        """The error for a rank that has ended without saying why, such as one that was killed."""
        with suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(_GOODBYE_S)
        self._logs[rank].seek(0)
        words = self._logs[rank].read().strip().splitlines()
        code = self._processes[rank].poll()
        said = words[-1] if words else "without a word"
        return BenchError(f"{self.contender.name}: rank {rank} ended with exit code {code}: {said}")


def compete(contenders: Sequence[Contender], config: SuiteConfig) -> tuple[list[Entry], list[Absence]]:
    """Starts all contenders one after the other, then lets them take turns for ``config.bench.rounds`` rounds.

    Returns:
        The entries of those that ran to the end, and the absences of those that failed; the others went
        on without them.

    Raises:
        BenchError: none ran to the end.
    """
    bench = config.bench
    absences: list[Absence] = []
    with ExitStack() as stack:
        running = [stack.enter_context(Entrant(contender, config)) for contender in contenders]

        def each(act: Callable[[Entrant], Answer]) -> dict[Entrant, Answer]:
            answers = {}
            for entrant in list(running):
                try:
                    answers[entrant] = act(entrant)
                except BenchError as error:
                    logger.warning("did not run: %s", error)
                    entrant.end()
                    running.remove(entrant)
                    absences.append(Absence(entrant.contender, str(error)))
            return answers

        starts = each(lambda entrant: _start(entrant, bench.warmup_steps))
        rounds: list[dict[Entrant, Turn]] = []
        for number in range(bench.rounds):
            rounds.append(each(lambda entrant: entrant.turn(bench.steps)))
            times = "  ".join(
                f"{entrant.contender.name} {min(turn.step_ms):.0f}" for entrant, turn in rounds[-1].items()
            )
            logger.info("round %d/%d, best ms: %s", number + 1, bench.rounds, times)
        footprints = each(Entrant.footprint)
        for entrant in running:
            entrant.dismiss()  # all at once, so that leaving takes as long as the slowest
    if not running:
        raise BenchError(f"no contender ran; {absences[0].reason}")
    entries = [
        Entry(entrant.contender, *starts[entrant], [turns[entrant] for turns in rounds], footprints[entrant])
        for entrant in running
    ]
    return entries, absences


def _start(entrant: Entrant, warmup_steps: int) -> tuple[float, Turn]:
    first_step_s = entrant.start()
    warmup = entrant.turn(warmup_steps)
    if (left := memory_left()) < _LEAST_MEMORY_LEFT:
        raise BenchError(
            f"{entrant.contender.name}: only {left:.0%} of the memory is left; all contenders hold theirs at once, so "
            "race fewer (bench.peers, bench.stages) or take a smaller model"
        )
    logger.info("%s: first step after %.1f s", entrant.contender.name, first_step_s)
    return first_step_s, warmup


def _not_none(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None  # standard input and output are piped
    return pipe
