"""Progress of a command over files: a bar on a terminal, elsewhere a line now and then; on standard error."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from dtrain.telemetry.live_view import can_redraw

_LINE_S = 10.0


class WorkProgress:
    """Shows how much is done, and tokens per second if tokens are counted.

    Args:
        name: of the work.
        total: bytes of all work.
        done: bytes that were done before.
    """

    def __init__(self, name: str, total: int, done: int = 0) -> None:
        self._name, self._total, self._done, self._tokens = name, total, done, 0
        self._start = self._printed = time.monotonic()
        self._bar: Bar | None = None
        if can_redraw(terminal := Console(stderr=True)):
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                TaskProgressColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                console=terminal,
                transient=True,
                expand=True,
            )
            self._task = self._bar.add_task(name, total=max(total, 1), completed=done, rate="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif kind is None and self._tokens:
            self._line(self._tokens, self._total)

    def print(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def finished(self, size: int, tokens: int = 0) -> None:
        """Counts work that is finished."""
        self._done += size
        self._tokens += tokens
        self.in_work(0, 0)

    def in_work(self, tokens: int, size: int) -> None:
        """Shows tokens and bytes of unfinished work beside those that are finished."""
        done = min(self._done + size, self._total)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, rate=self._rate(self._tokens + tokens))
        elif time.monotonic() - self._printed > _LINE_S:
            self._line(self._tokens + tokens, done)

    def _line(self, tokens: int, done: int) -> None:
        self._printed = time.monotonic()
        share = 100 * done / max(self._total, 1)
        print("  ".join(filter(None, (self._name, f"{share:.0f} %", self._rate(tokens)))), file=sys.stderr, flush=True)

    def _rate(self, tokens: int) -> str:
        if not tokens:
            return ""
        seconds = max(time.monotonic() - self._start, 1e-9)
        return f"{tokens / 1e6:.1f}M tokens, {tokens / seconds / 1e6:.2f}M tokens/s"
