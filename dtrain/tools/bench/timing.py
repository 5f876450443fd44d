"""Timings of operations that take turns in one process, and their table."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from dtrain.config.dump import config_to_dict
from dtrain.tools.bench.records import Timing, Timings
from dtrain.tools.bench.tables import describe_machine, spread
from dtrain.tools.host import describe_host
from dtrain.tools.tables import Column, markdown_table


@dataclass(frozen=True)
class Operation:
    """What a contender does in its turn, and the bytes that this must move."""

    run: Callable[[], object]
    nbytes: int


def take_turns(operations: Mapping[str, Operation], rounds: int, device: torch.device) -> list[Timing]:
    """Times every operation once a round, after one that is not counted."""
    ms: dict[str, list[float]] = {name: [] for name in operations}
    for number in range(rounds + 1):
        for name, operation in operations.items():
            elapsed = _time(operation, device)
            if number:
                ms[name].append(elapsed)
    return [Timing(name, operation.nbytes, ms[name]) for name, operation in operations.items()]


def _time(operation: Operation, device: torch.device) -> float:
    start = time.perf_counter()
    operation.run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1000 * (time.perf_counter() - start)


def make_timings(
    suite: str,
    command: str,
    config: Any,
    about: str,
    measure: Callable[[], list[Timing]],
    *,
    rivals: list[str],
    bandwidth: str | None = None,
) -> Timings:
    """The record of what ``measure`` timed, with the facts of machine and command."""
    load = os.getloadavg()[0]
    date = time.strftime("%Y-%m-%dT%H:%M:%S")
    values = config_to_dict(config)
    return Timings(suite, command, date, describe_host(), values, load, about, bandwidth, rivals, measure())


def describe_timings(results: Timings) -> str:
    """Everything about one run in Markdown."""
    found = {(timing.case, timing.contender): timing for timing in results.timings}

    def share(timing: Timing) -> str:
        measure = found[timing.case, str(results.bandwidth)].gb_per_s()
        return spread([own / other for own, other in zip(timing.gb_per_s(), measure, strict=True)], 2)

    def speed_up(timing: Timing, name: str) -> str:
        rival = found[timing.case, name]
        return spread([other / own for own, other in zip(timing.ms, rival.ms, strict=True)], 2)

    columns: list[Column[Timing]] = [
        ("contender", lambda timing: timing.contender),
        ("ms", lambda timing: spread(timing.ms, 2)),
        ("GB/s", lambda timing: f"{median(timing.gb_per_s()):.1f}"),
        *((f"speed-up over {name}", lambda timing, name=name: speed_up(timing, name)) for name in results.rivals),
    ]
    if results.bandwidth is not None:
        columns.insert(3, (f"GB/s / {results.bandwidth}", share))
    if any(timing.case for timing in results.timings):
        columns.insert(0, ("of", lambda timing: timing.case))
    rounds = len(results.timings[0].ms)
    facts = [
        f"`{results.command}`",
        f"{results.date}, {describe_machine(results.host)}.",
        f"{results.about} {rounds} rounds, contenders in turn; median (least to most); load before them "
        f"{results.load:.1f}.",
    ]
    return "\n\n".join([*facts, markdown_table(columns, results.timings)])
