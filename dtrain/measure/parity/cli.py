"""``dtrain parity key=value ...``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dtrain.cli.resolve import read_suite
from dtrain.config.commands import PARITY
from dtrain.distributed.logging import configure_logging
from dtrain.distributed.startup.launch_env import LaunchEnv
from dtrain.errors import ConfigError
from dtrain.measure.parity.records import REPORT_FILE, EngineResult, ParityReport, WorstDeviation
from dtrain.redaction.redact import redact_text
from dtrain.tools.command import command_text

if TYPE_CHECKING:  # brings torch
    from dtrain.measure.parity.curves import Case, CurvesReport

_PIPED_WIDTH = 160


def main(argv: Sequence[str]) -> int:
    """Compares the engines; returns 0 if all agree with the oracle, else 1."""
    config = read_suite(argv, PARITY)
    if config is None:
        return 0
    if LaunchEnv.read().launched:
        raise ConfigError("dtrain parity starts its own ranks; start it once, without a launcher, and set parity.ranks")
    configure_logging(0)
    from dtrain.measure.parity.run import PICTURE_FILE, run_parity  # brings torch

    report, run_dir = run_parity(config, command_text("parity", argv))
    console = Console()
    console = console if console.is_terminal else Console(width=_PIPED_WIDTH)
    files = REPORT_FILE
    if isinstance(report, ParityReport):
        show(report, console)
        files += f", {PICTURE_FILE}"
    else:
        show_curves(report, console)
    print(f"{run_dir}: {files}", flush=True)
    return 0 if report.agrees else 1


def show(report: ParityReport, console: Console) -> None:
    columns = ("engine", "stage", "applied", "skipped", "worst loss", "worst weights", "tensor", "result")
    title = f"{report.precision} against the FP32 oracle, {report.num_parameters:,} parameters"
    console.print(_table(title, columns, map(_cells, report.engines)))
    for result in report.engines:
        console.print(Text(redact_text(f"{result.engine} {result.summary}")))
    for name, reason in report.left_out.items():
        console.print(Text(redact_text(f"{name} left out: {reason}")))


def show_curves(report: CurvesReport, console: Console) -> None:
    columns = ("engine", "stage", "precision", "result", "deviation", "bound", "seconds")
    title = f"losses against FP32 on the CPU, which fall from {report.reference[0]:.4f} to {report.reference[-1]:.4f}"
    rows = [row for row in report.rows if row.status != "left out"]
    console.print(_table(title, columns, map(_curve_cells, rows)))
    for row in report.rows:
        if row.reason:
            console.print(Text(redact_text(f"{row.name} {row.status}: {row.reason}")))


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title)
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _curve_cells(row: Case) -> list[str]:
    deviation = "-" if row.deviation is None else f"{row.deviation:.1e}"
    bound = "-" if row.bound is None else f"{row.bound:g}"
    return [row.engine, str(row.zero_stage), row.precision, row.status, deviation, bound, f"{row.seconds:.1f}"]


def _cells(result: EngineResult) -> list[str]:
    skipped = sum(point.reason is not None for point in result.curve)
    loss, weights = result.worst(of_loss=True), result.worst(of_loss=False)
    return [
        result.engine,
        str(result.zero_stage),
        str(len(result.curve) - skipped),
        str(skipped),
        _deviation(loss),
        _deviation(weights),
        weights.quantity if weights else "-",
        "failed" if result.failure else "agrees" if result.agrees else "deviates",
    ]


def _deviation(worst: WorstDeviation | None) -> str:
    if worst is None:
        return "-"
    return f"{worst.deviation:.1e}, step {worst.step}, {worst.share:.0%} of limit"
