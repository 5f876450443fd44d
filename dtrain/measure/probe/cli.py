"""``dtrain probe key=value ...``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dtrain.cli.resolve import read_suite
from dtrain.config.commands import PROBE
from dtrain.distributed.logging import configure_logging
from dtrain.distributed.startup.launch_env import LaunchEnv
from dtrain.errors import ConfigError
from dtrain.tools.tables import show

if TYPE_CHECKING:  # it brings torch, for which --help and a mistake need not wait
    from dtrain.measure.probe.report import ProbeReport

REPORT_FILE = "probe.json"
PICTURE_FILE = "probe.png"
PAGE_FILE = "probe.html"
_NUM_LISTED = 5  # products of a format on the terminal; the page has more


def main(argv: Sequence[str]) -> int:
    """Probes the model, prints tables and advice, and writes the report; returns 0."""
    config = read_suite(argv, PROBE)
    if config is None:
        return 0
    if LaunchEnv.read().launched:
        raise ConfigError("dtrain probe is one process; start it without a launcher")
    configure_logging(0)
    from dtrain.measure.probe.page import write_page
    from dtrain.measure.probe.picture import draw
    from dtrain.measure.probe.report import write_report
    from dtrain.measure.probe.run import run_probe
    from dtrain.tools.command import command_text

    report, run_dir = run_probe(config, command_text("probe", argv))
    write_report(run_dir / REPORT_FILE, report)
    draw(report, run_dir / PICTURE_FILE)
    write_page(run_dir / PAGE_FILE, report, (run_dir / PICTURE_FILE).read_bytes())
    print_report(report)
    print(f"{run_dir}: {REPORT_FILE}, {PICTURE_FILE}, {PAGE_FILE}")
    print(f"\n{report.advice.line}", flush=True)
    return 0


def print_report(report: ProbeReport) -> None:
    """Prints the tables, what they mean, and the reasons of the advice."""
    from dtrain.measure.probe import sections

    show([sections.trial_table(report)])
    _print("", sections.trial_notes(report))
    show([sections.product_table(report, _NUM_LISTED)])
    if report.flips:
        show([sections.flip_table(report, _NUM_LISTED)])
        _print("", sections.flip_notes(report))
    _print("", [*sections.scale_notes(report), sections.time_note(report)])
    _print("Advice:", sections.advice_notes(report))
    _print("Not tested:", report.advice.untested)


def _print(title: str, lines: Sequence[str]) -> None:
    if title:
        print(title)
    for line in lines:
        print(f"- {line}" if title else line)
    print()
