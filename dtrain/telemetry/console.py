"""Console output of a run on rank 0 (standard error): a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rich.console import Console as RichConsole
from rich.live import Live

from dtrain.distributed.logging import logger
from dtrain.telemetry.live_view import LONG_WAIT, LiveView, can_redraw, start_live
from dtrain.telemetry.metrics import CHECKPOINTS, METRICS_FILE, StepMetrics, read_metrics
from dtrain.telemetry.progress import RunProgress, last_checkpoint
from dtrain.telemetry.texts import clean, rate

if TYPE_CHECKING:  # it imports torch, which those who only want a format need not wait for
    from dtrain.telemetry.precision import PrecisionFindings

_REFRESHES_PER_S = 2
_LOWEST_COSINE = 0.9  # of the gradients in FP8 and in BF16 before the console says so


class Console:
    """Prints logged steps as lines, or on a terminal shows them in a live view below the log lines.

    Args:
        total_steps: of the whole run.
        start_step: the step from which this process continues.
        run_dir: its metrics of the steps before begin the view's curve; its checkpoints are looked up by name.
        unit: what counts in the loss, ``tokens`` or ``samples``.
    """

    def __init__(self, total_steps: int, start_step: int, run_dir: Path, unit: str = "tokens") -> None:
        self._total = total_steps
        self._unit = unit
        self._run_dir = run_dir
        self._progress = RunProgress(total_steps, start_step)
        self._progress.unit = unit
        self._live: Live | None = None
        self._advised: set[str] = set()
        self._streams: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []
        terminal = RichConsole(stderr=True)
        if can_redraw(terminal):
            self._start_view(terminal)

    def step(self, metrics: StepMetrics) -> None:
        """Shows a logged step; a skipped one always gets a line of its own."""
        if self._live is not None:
            self._progress.add(vars(metrics))
        cosine = metrics.float8_gradient_cosine
        if cosine is not None and cosine < _LOWEST_COSINE and "" not in self._advised:
            self._advised.add("")  # of the whole model
            logger.warning("step %d: %s", metrics.step, _float8_advice(cosine))
        line = format_step(metrics, self._total, self._unit)
        if not metrics.applied:
            logger.warning(line)
        elif self._live is None:
            logger.info(line)

    def validation(self, step: int, losses: Mapping[str, float]) -> None:
        self._progress.add({"step": step, **losses})
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
        # the handlers first: they write to a proxy that ends with the view
        for handler, stream in self._streams:
            handler.setStream(stream)
        self._streams.clear()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _start_view(self, terminal: RichConsole) -> None:
        with suppress(OSError):
            for line in read_metrics(self._run_dir / METRICS_FILE):
                self._progress.add(line)
        self._progress.start()
        name = clean(str(self._run_dir))
        self._live = start_live(lambda: self._view(name), terminal, refreshes_per_s=_REFRESHES_PER_S, transient=True)
        # rich replaces sys.stderr by a proxy that prints above the view; log lines must go through it
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler):
                self._streams.append((handler, handler.stream))
                handler.setStream(sys.stderr)

    def _view(self, name: str) -> LiveView:
        return LiveView(self._progress, name, time.time(), last_checkpoint(self._run_dir / CHECKPOINTS))


def format_step(metrics: StepMetrics, total_steps: int, unit: str = "tokens") -> str:
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
    parts += [rate(metrics.tokens_per_s, unit), f"{metrics.step_ms:.0f} ms"]
    if metrics.float8_gradient_cosine is not None:
        parts.append(f"float8 cosine {metrics.float8_gradient_cosine:.4f}")
    if metrics.data_wait_ms > LONG_WAIT * metrics.step_ms:
        parts.append(f"data_wait {metrics.data_wait_ms:.0f} ms")
    return "  ".join(parts)


def _float8_advice(cosine: float) -> str:
    return (
        f"the gradients in FP8 and in BF16 have a cosine of {cosine:.3f}, below {_LOWEST_COSINE}: take a "
        f"precision.float8.recipe with more scales (rowwise, or blockwise where there is one), keep modules out of FP8 "
        f"by precision.rules (dtrain formats histogram shows the worst), or finish the run with precision=bf16"
    )


def memory_lines(memory: dict[str, int], formula: dict[str, int], host_kinds: Collection[str] = ()) -> list[str]:
    """Formats bytes on one rank by kind, beside the ZeRO formula (Rajbhandari et al., 2020, section 5).

    ``host_kinds``: those that lie in the memory of the host beside a GPU.
    """
    lines = []
    for kind in [*memory, *(key for key in formula if key not in memory)]:
        measured, expected = memory.get(kind, 0), formula.get(kind)
        against = f"  (ZeRO formula {_mebibytes(expected)})" if expected is not None else ""
        where = "  on the host" if kind in host_kinds else ""
        lines.append(f"memory {kind:<14} {_mebibytes(measured):>12}{against}{where}")
    total, formula_total = sum(memory.values()), sum(formula.values())
    lines.append(f"memory {'total':<14} {_mebibytes(total):>12}  (ZeRO formula {_mebibytes(formula_total)})")
    if host_kinds:
        on_device = sum(nbytes for kind, nbytes in memory.items() if kind not in host_kinds)
        lines.append(f"memory {'on the device':<14} {_mebibytes(on_device):>12}")
    return lines


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"
