"""``dtrain watch RUN``: shows a run from its files. Imports no torch, writes nothing, and takes no lease."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from dtrain.errors import ConfigError
from dtrain.redaction.printable import printable
from dtrain.redaction.redact import redact_text
from dtrain.telemetry.live_view import LiveView, can_redraw, start_live
from dtrain.telemetry.texts import clean
from dtrain.tools.tables import Column, Table, plural, show
from dtrain.tools.watch.files import is_run
from dtrain.tools.watch.state import WatchedRun

_PERIOD_S = 1.0
_PAUSES = 10  # of a period, after each of which Ctrl-C is heard
_LISTED = 5

_COLUMNS: Sequence[Column[LiveView]] = (
    ("run", lambda view: view.name),
    ("step", lambda view: view.step_text()),
    ("loss", lambda view: view.loss_text()),
    ("state", lambda view: view.status.partition(";")[0]),
)


def main(argv: Sequence[str]) -> int:
    """Returns 0; a folder that holds no run raises ``ConfigError``."""
    parser = argparse.ArgumentParser(
        "dtrain watch",
        description="Shows a run from its files: on a terminal until it ends (Ctrl-C leaves it alone), else once. Of a "
        "folder of runs, such as a sweep, it lists them.",
    )
    parser.add_argument("run", type=Path, help="a run directory of dtrain train, or a folder of some")
    parser.add_argument("--once", action="store_true", help="print the state once, as plain text")
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed the reason
        return 2 if stop.code else 0
    path: Path = arguments.run
    if not is_run(path):
        _list_runs(path)
        return 0
    run = WatchedRun(path)
    terminal = Console()
    if arguments.once or not can_redraw(terminal):
        _print(run.view(), terminal.encoding)
        return 0
    _follow(run, terminal)
    return 0


def _print(view: LiveView, encoding: str) -> None:
    figures = view.plain(ascii_only=not encoding.startswith("utf"))
    width = max(len(name) for name, _ in figures)
    text = "\n".join(f"{name:<{width}}  {value}" for name, value in figures)
    print(printable(redact_text(text)).encode(encoding, "replace").decode(encoding))


def _follow(run: WatchedRun, terminal: Console) -> None:
    """Shows ``run`` until it ends, or until Ctrl-C."""
    interrupted = False

    def interrupt(*_: object) -> None:  # an exception could be lost: Python ignores those in finalizers
        nonlocal interrupted
        interrupted = True

    previous = signal.signal(signal.SIGINT, interrupt)
    live = start_live(run.view, terminal, refreshes_per_s=None, transient=False)
    try:
        pause = 0
        while run.may_change and not interrupted:
            time.sleep(_PERIOD_S / _PAUSES)
            pause = (pause + 1) % _PAUSES
            if not pause:
                live.refresh()
    finally:
        live.stop()
        signal.signal(signal.SIGINT, previous)


def _list_runs(path: Path) -> None:
    """Prints a line for each run in a folder.

    Raises:
        ConfigError: there is none, or no such folder.
    """
    if not os.path.isdir(path):
        found = "a file" if os.path.exists(path) else "no such folder"
        raise ConfigError(f"{path}: {found}; expected the run directory of dtrain train, such as runs/mine")
    try:
        folders = sorted(path.iterdir(), key=lambda entry: (len(entry.name), entry.name))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; expected a run directory or a folder of runs"
        ) from error
    runs = [folder for folder in folders if is_run(folder)]
    if not runs:
        names = ", ".join(folder.name for folder in folders[:_LISTED])
        more = f" and {len(folders) - _LISTED} more" if len(folders) > _LISTED else ""
        raise ConfigError(
            printable(
                f"{path} is no run: expected a folder with config.yaml and metrics.jsonl, as dtrain train writes it, "
                f"or with runs in it; it holds {names + more or 'nothing'}"
            )
        )
    views = [WatchedRun(folder).view() for folder in runs]
    title = f"{plural(len(runs), 'run')} in {clean(str(path))}; dtrain watch {views[0].name} shows the first"
    show([Table.of(title, _COLUMNS, views)])
