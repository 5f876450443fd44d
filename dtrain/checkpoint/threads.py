"""Starts the threads of a save, which may still run when the interpreter ends."""

from __future__ import annotations

import threading


def start(thread: threading.Thread) -> bool:
    """Starts ``thread``; returns False if that is refused, and its caller does the work itself.

    Python 3.12.0 and 3.12.1 start no thread once the main thread has ended, although they wait for a save under way.
    """
    try:
        thread.start()
    except RuntimeError:
        return False
    return True
