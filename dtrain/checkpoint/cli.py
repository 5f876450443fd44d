"""``dtrain checkpoint list PATH`` and ``dtrain checkpoint verify PATH``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dtrain.checkpoint.directory import of_run, quarantined
from dtrain.checkpoint.report import CheckpointReport, list_checkpoints, verify
from dtrain.errors import CheckpointError

_USAGE = 2
_PATH_HELP = "a run directory, its checkpoints/ directory, or one step-... directory"


def main(argv: Sequence[str]) -> int:
    """Runs one verb and returns the exit code: 0 all good, 1 a checkpoint is bad, 2 bad usage or nothing there."""
    parser = argparse.ArgumentParser("dtrain checkpoint", description="Looks at checkpoints; changes nothing.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, help_text in (
        ("list", "what is there, without reading the data"),
        ("verify", "read every byte and check it"),
    ):
        verbs.add_parser(verb, help=help_text, description=help_text).add_argument("path", type=Path, help=_PATH_HELP)
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has said why
        return _USAGE if stop.code else 0
    try:
        return _list(arguments.path) if arguments.verb == "list" else _verify(arguments.path)
    except CheckpointError as error:
        print(f"dtrain: {error}", file=sys.stderr)
        return _USAGE


def _list(path: Path) -> int:
    rows: list[tuple[str, ...]] = [("name", "saved", "size", "files", "world size", "status")]
    for item in list_checkpoints(path):
        status = "ok" if item.ok else f"BAD {item.problem}"
        counts = ("?" if count is None else str(count) for count in (item.num_files, item.world_size))
        rows.append((item.path.name, item.saved_at or "?", _size(item.num_bytes), *counts, status))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        print("  ".join([*(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=True)), row[-1]]))
    for damaged in quarantined(of_run(path)):
        print(f"set aside: {damaged.name}")
    return 0


def _verify(path: Path) -> int:
    report = verify(path)
    for item in report.checkpoints:
        print(_line(item))
    return 0 if report.ok else 1


def _line(item: CheckpointReport) -> str:
    if not item.ok:
        return f"BAD {item.path.name} {item.problem}"
    files = "1 file" if item.num_files == 1 else f"{item.num_files} files"
    return f"ok  {item.path.name}  {_size(item.num_bytes)}  {files}"


def _size(count: int | None) -> str:
    if count is None:
        return "?"
    if count < 1000:
        return f"{count} B"
    power = min(4, (len(str(count)) - 1) // 3)
    return f"{count / 1000**power:.1f} {('kB', 'MB', 'GB', 'TB')[power - 1]}"
