"""Console output of a run on rank 0 (standard error): a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from dtrain.distributed.logging import logger
from dtrain.telemetry.metrics import StepMetrics
from dtrain.telemetry.precision import PrecisionFindings

_LONG_WAIT = 0.05
"""Fraction of a step above which the time that it waited for its batch is shown."""


class Console:
    """Prints logged steps as lines, or on a terminal beside a progress bar."""

    def __init__(self, total_steps: int, start_step: int) -> None:
        self._total = total_steps
        self._progress: Progress | None = None
        self._advised: set[str] = set()
        self._streams: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []
        if sys.stderr.isatty():
            self._start_progress(start_step)

    def step(self, metrics: StepMetrics) -> None:
        """Shows a logged step; a skipped one always gets a line of its own."""
        line = format_step(metrics, self._total)
        if not metrics.applied:
            logger.warning(line)
        elif self._progress is None:
            logger.info(line)
        if self._progress is not None:
            task = self._progress.task_ids[0]
            self._progress.update(task, completed=metrics.step, status=line.split("  ", 1)[1], refresh=True)

    def validation(self, step: int, losses: Mapping[str, float]) -> None:
        listed = "  ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
        logger.info("step %d/%d  %s", step, self._total, listed)

    def precision(self, findings: PrecisionFindings) -> None:
        """Says what a format loses, once for each parameter or module, and where gradients leave a probe's range."""
        name, message = findings.advice() or ("", "")
        if message and name not in self._advised:
            self._advised.add(name)
            logger.warning("step %d: %s", findings.step, message)
        if findings.departures:
            first, *others = findings.departures
            more = f" (and {len(others)} more, in precision/step-{findings.step}.json)" if others else ""
            logger.warning("step %d: %s%s; run dtrain probe with more steps", findings.step, first, more)

    def close(self, exit_code: int) -> None:
        # the handlers first: they write to a proxy that ends with the progress bar
        for handler, stream in self._streams:
            handler.setStream(stream)
        self._streams.clear()
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _start_progress(self, start_step: int) -> None:
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),  # the remaining width
            TextColumn("{task.fields[status]}", markup=False, table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            console=RichConsole(stderr=True),
            transient=True,
            expand=True,
        )
        self._progress.add_task("train", total=self._total, completed=start_step, status="")
        self._progress.start()
        # rich replaces sys.stderr by a proxy that prints above the progress bar; log lines must go through it
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler):
                self._streams.append((handler, handler.stream))
                handler.setStream(sys.stderr)


def format_step(metrics: StepMetrics, total_steps: int) -> str:
    """Formats one line: ``step 20/200  loss 3.2140  lr 2.00e-03  grad_norm 1.02  45.2k tok/s  310 ms``."""
    head = f"step {metrics.step}/{total_steps}"
    if not metrics.applied:
        culprit = f"  culprit: {metrics.culprit}" if metrics.culprit else ""
        return f"{head}  skipped: {metrics.reason}  loss_scale {metrics.loss_scale:g}{culprit}"
    parts = [head, f"loss {metrics.loss:.4f}", f"lr {metrics.lr:.2e}", f"grad_norm {metrics.grad_norm:.3g}"]
    if metrics.loss_scale != 1.0:
        parts.append(f"loss_scale {metrics.loss_scale:g}")
    if metrics.skipped_steps:
        parts.append(f"skipped {metrics.skipped_steps}")
    parts += [f"{compact(metrics.tokens_per_s)} tok/s", f"{metrics.step_ms:.0f} ms"]
    if metrics.data_wait_ms > _LONG_WAIT * metrics.step_ms:
        parts.append(f"data_wait {metrics.data_wait_ms:.0f} ms")
    return "  ".join(parts)


def compact(number: float) -> str:
    """Formats a count with three digits: ``950``, ``45.2k``, ``124M``."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def printable(text: str) -> str:
    """Replaces control characters except newlines and tabs, so that ``text`` cannot control a terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


def memory_lines(memory: dict[str, int], formula: dict[str, int]) -> list[str]:
    """Formats bytes on one rank by kind, beside the ZeRO formula (Rajbhandari et al., 2020, section 5)."""
    lines = []
    for kind in [*memory, *(key for key in formula if key not in memory)]:
        measured, expected = memory.get(kind, 0), formula.get(kind)
        against = f"  (ZeRO formula {_mebibytes(expected)})" if expected is not None else ""
        lines.append(f"memory {kind:<14} {_mebibytes(measured):>12}{against}")
    total, formula_total = sum(memory.values()), sum(formula.values())
    return [*lines, f"memory {'total':<14} {_mebibytes(total):>12}  (ZeRO formula {_mebibytes(formula_total)})"]


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"
