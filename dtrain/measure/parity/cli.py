"""``dtrain parity key=value ...``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dtrain.cli.resolve import read_suite
from dtrain.config.commands import PARITY
from dtrain.distributed.logging import configure_logging
from dtrain.distributed.startup.launch_env import LaunchEnv
from dtrain.errors import ConfigError
from dtrain.measure.parity.records import EngineResult, ParityReport, WorstDeviation
from dtrain.redaction.redact import redact_text
from dtrain.tools.command import command_text

_PIPED_WIDTH = 160


def main(argv: Sequence[str]) -> int:
    """Compares the engines; returns 0 if all agree with the oracle, else 1."""
    config = read_suite(argv, PARITY)
    if config is None:
        return 0
    if LaunchEnv.read().launched:
        raise ConfigError("dtrain parity starts its own ranks; start it once, without a launcher, and set parity.ranks")
    configure_logging(0)
    from dtrain.measure.parity.run import PICTURE_FILE, REPORT_FILE, run_parity  # brings torch

    report, run_dir = run_parity(config, command_text("parity", argv))
    console = Console()
    show(report, console if console.is_terminal else Console(width=_PIPED_WIDTH))
    print(f"{run_dir}: {REPORT_FILE}, {PICTURE_FILE}", flush=True)
    return 0 if report.agrees else 1


def show(report: ParityReport, console: Console) -> None:
    table = Table(title=f"{report.precision} against the FP32 oracle, {report.num_parameters:,} parameters")
    for title in ("engine", "stage", "applied", "skipped", "worst loss", "worst weights", "tensor", "result"):
        table.add_column(title, overflow="fold")
    for result in report.engines:
        table.add_row(*map(Text, _cells(result)))
    console.print(table)
    for result in report.engines:
        console.print(Text(redact_text(f"{result.engine} {result.summary}")))
    for name, reason in report.left_out.items():
        console.print(Text(redact_text(f"{name} left out: {reason}")))


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
