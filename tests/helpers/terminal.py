"""A command in a terminal of its own: a pseudo-terminal, and what its screen shows."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
_RUN = "import os, sys; os.login_tty(int(sys.argv.pop(1))); from dtrain.__main__ import main; sys.exit(main())"
_CODE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])")
PATIENCE_S = 240.0
_QUIET_S = 0.2  # views are drawn twice a second


class Screen:
    """The lines that a terminal shows, scrolled ones included; knows the controls that rich writes."""

    def __init__(self, width: int) -> None:
        self.lines = [""]
        self.cursor_shown = True
        self._width = width
        self._row = self._column = 0

    def feed(self, text: str) -> None:
        while text:
            if code := _CODE.match(text):
                self._control(code[1], code[2])
            else:
                self._put(text[0])
            text = text[code.end() if code else 1 :]

    def _control(self, argument: str, letter: str) -> None:
        if letter == "A":
            self._row = max(0, self._row - int(argument or 1))
        elif letter == "K":
            assert argument == "2"
            self.lines[self._row] = ""
        elif argument == "?25":
            self.cursor_shown = letter == "h"
        else:
            assert letter == "m", (argument, letter)

    def _put(self, char: str) -> None:
        if char == "\r":
            self._column = 0
            return
        if char == "\n" or self._column == self._width:
            self._row += 1
            self._column = 0 if char != "\n" else self._column
            self.lines += [""] * (self._row + 1 - len(self.lines))
        if char != "\n":
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = line[: self._column] + char + line[self._column + 1 :]
            self._column += 1


class Terminal:
    """``dtrain ARGV`` in a pseudo-terminal of ``width`` columns."""

    def __init__(self, *argv: str, cwd: Path, width: int = 80, env: Mapping[str, str] | None = None) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
        plain = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        plain |= {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", **(env or {})}
        command = [sys.executable, "-c", _RUN, str(slave), *argv]
        self._process = subprocess.Popen(command, cwd=cwd, env=plain, pass_fds=[slave], start_new_session=True)
        os.close(slave)
        self.screen = Screen(width)
        self._undecoded = b""

    def wait_until(self, condition: Callable[[list[str]], bool]) -> None:
        """Reads until the lines of the screen fulfill the condition, and then no more comes for a moment.

        Else the view may be half drawn, and ``^C``, which the terminal echoes, would stand in its middle.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not condition(self.screen.lines) or self._is_ready(_QUIET_S):
            is_news = self._read() and time.monotonic() < deadline
            assert is_news, "it ended or shows nothing new:\n" + "\n".join(self.screen.lines)

    def wait_for(self, text: str) -> None:
        self.wait_until(lambda lines: text in "\n".join(lines))

    def press_ctrl_c(self) -> None:
        os.write(self._master, b"\x03")

    def wait(self) -> int:
        """Reads to the end; returns the exit code."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read():
            assert time.monotonic() < deadline, "it does not end:\n" + "\n".join(self.screen.lines)
        return self._process.wait(PATIENCE_S)

    def _is_ready(self, timeout: float) -> bool:
        return select.select([self._master], [], [], timeout)[0] != []

    def _read(self) -> bool:
        try:
            data = os.read(self._master, 65536) if self._is_ready(PATIENCE_S) else b""
        except OSError:  # the other end is closed (EIO)
            data = b""
        self._undecoded += data
        # a character or a control sequence may come in two parts
        end = len(self._undecoded) if _is_whole(self._undecoded) else self._undecoded.rfind(b"\n") + 1
        self.screen.feed(self._undecoded[:end].decode())
        self._undecoded = self._undecoded[end:]
        return data != b""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)


def _is_whole(data: bytes) -> bool:
    try:
        return re.search(r"\x1b(\[[?\d;]*)?\Z", data.decode()) is None
    except UnicodeDecodeError:
        return False
