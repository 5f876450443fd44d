"""Other processes of this user, as the kernel shows them. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import NamedTuple


class ProcessStatus(NamedTuple):
    """A line of ``/proc/<pid>/stat``.

    Attributes:
        state: one letter; ``T`` is stopped by a signal, ``t`` by a debugger.
        start: when the process started, in the kernel's ticks, which tells it from a later one with the same number.
    """

    state: str
    start: str


def process_status(process: str) -> ProcessStatus | None:
    """Returns the status of a process (a number, or ``self``), or None if it has ended or cannot be seen."""
    try:
        # proc(5): the name in parentheses may hold blanks and parentheses, so the fields are counted after the last one
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else ProcessStatus(fields[0], fields[19])


def process_start(process: str) -> str | None:
    """Returns when a process started, in the kernel's ticks, or None if it has ended or cannot be seen."""
    status = process_status(process)
    return None if status is None else status.start


def host_identity() -> list[str] | None:
    """Returns a value that ranks have in common if they see the same processes; None if the system has none."""
    try:
        return [Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"), os.readlink("/proc/self/ns/pid")]
    except OSError:
        return None


def name_ranks(ranks: Iterable[int]) -> str:
    """Returns ``rank 3``, or ``ranks 0-2, 5``."""
    numbers = sorted(ranks)
    key: Callable[[tuple[int, int]], int] = lambda item: item[1] - item[0]  # noqa: E731
    spans = [[number for _, number in group] for _, group in groupby(enumerate(numbers), key)]
    listed = ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)
    return f"rank{'s' if len(numbers) > 1 else ''} {listed}"


def open_descriptor(pid: int, descriptor: int, inode: int, flags: int) -> int:
    """Opens an open file of another process of this user, and returns the new descriptor.

    Raises:
        OSError: it cannot be opened, or is another file.
    """
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", flags | os.O_CLOEXEC)
    if os.fstat(opened).st_ino != inode:  # the number is another process in this rank's /proc
        os.close(opened)
        raise OSError(f"/proc/{pid} is another process here")
    return opened
