"""Stop signals: the first SIGTERM, SIGUSR1 or Ctrl-C requests a stop, a second one ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

# A signal to a whole process group, which a launcher forwards too, arrives twice within milliseconds: one request.
_SAME_REQUEST_S = 1.0


class StopSignals:
    """Context in which a stop signal only sets ``requested``; the previous handlers are restored at its end.

    A second signal, more than a second after the first, ends the process as if there were no handler: a step that
    hangs must not hold a machine that is being reclaimed. Outside the main thread, where Python allows no handlers,
    the context does nothing.
    """

    def __init__(self) -> None:
        self._first: float | None = None
        self._name = ""
        self._previous: dict[signal.Signals, object] = {}

    @property
    def requested(self) -> bool:
        return self._first is not None

    @property
    def name(self) -> str:
        """Name of the first signal, such as ``SIGTERM``; empty before."""
        return self._name

    def ignore(self) -> None:
        """Ignores stop signals for the rest of the process, which is about to end; no handler is restored.

        A launcher that sees another rank leave sends one more, which would turn the exit code into that of a crash.
        """
        for number in self._previous:
            signal.signal(number, signal.SIG_IGN)
        self._previous.clear()

    def keep(self) -> None:
        """Keeps these handlers for the rest of the process, which is about to end by an error.

        When another rank has ended, a launcher sends this one a signal, possibly before it has printed its error. The
        previous handlers could end it first.
        """
        self._previous.clear()

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # None: set by C code, which signal.signal cannot put back
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)  # type: ignore[arg-type]
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first, self._name = now, signal.Signals(number).name
        elif now - self._first > _SAME_REQUEST_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
