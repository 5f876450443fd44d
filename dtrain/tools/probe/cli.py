"""``dtrain probe key=value ...``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from dtrain.cli.resolve import read_suite
from dtrain.config.commands import PROBE
from dtrain.distributed.launch_env import LaunchEnv
from dtrain.distributed.logging import configure_logging
from dtrain.errors import ConfigError
from dtrain.tools.probe.report import (
    ConstantScale,
    ProbeReport,
    flip_table,
    noise_lines,
    product_table,
    trial_table,
    write_report,
)
from dtrain.tools.tables import show

REPORT_FILE = "probe.json"
PICTURE_FILE = "probe.png"
PAGE_FILE = "probe.html"


def main(argv: Sequence[str]) -> int:
    """Probes the model, prints tables and advice; returns 0."""
    config = read_suite(argv, PROBE)
    if config is None:
        return 0
    if LaunchEnv.read().launched:
        raise ConfigError("dtrain probe is one process; start it without a launcher")
    configure_logging(0)
    from dtrain.tools.probe.run import run_probe  # brings torch

    report, run_dir = run_probe(config, shlex.join(["dtrain", "probe", *argv]))
    write_report(run_dir / REPORT_FILE, report)
    print_report(report)
    print(f"{run_dir}: {REPORT_FILE}")
    print(f"\n{report.advice.line}", flush=True)
    return 0


def print_report(report: ProbeReport) -> None:
    """Prints the tables, and the reasons of the advice."""
    show([trial_table(report)])
    _print_lines(noise_lines(report))
    emulated = [trial.format for trial in report.trials if trial.ms_per_step is None and trial.losses]
    if emulated:
        print(f"No time for {', '.join(emulated)}: emulated on {report.device}, so that it would say nothing.")
    print()
    for trial in report.trials[1:]:
        if report.worst(trial.format):
            show([product_table(report, trial.format)])
    if report.flips:
        show([flip_table(report)])
    scale = ConstantScale.of(report.analysis)
    if scale is not None:
        print(f"{scale}.\n")
    advice = report.advice
    print("Advice, and why:")
    _print_lines([f"- {reason}" for reason in (*advice.reasons, *(rule.reason for rule in advice.rules))])
    print("Not tested:")
    _print_lines([f"- {item}" for item in advice.untested])
    seconds = ", ".join(f"{name} {value:.0f}" for name, value in report.seconds.items())
    print(f"\nSeconds: {seconds}")


def _print_lines(lines: Sequence[str]) -> None:
    for line in lines:
        print(line)
