"""``dtrain bench SUITE key=value ...`` and ``dtrain bench report FILE ...``."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from dtrain.cli.resolve import read_suite
from dtrain.config.commands import SUITES
from dtrain.distributed.logging import configure_logging, logger
from dtrain.errors import ConfigError, nearest
from dtrain.measure.bench.peers import check_peers
from dtrain.measure.bench.records import AnyResults, OperationResults, TableResults, read_results
from dtrain.measure.bench.report.document import describe, update_document
from dtrain.measure.bench.training.cases import check_engines
from dtrain.measure.record import write_record
from dtrain.tools.command import command_text

_LINES = {suite.name: suite.measures for suite in SUITES.values()} | {
    "report": "writes the tables of results files into a document, between their markers"
}
_USAGE = """usage: dtrain bench SUITE [key=value ...]
       dtrain bench report FILE.json ... [bench.docs=docs/results/benchmarks.md]

{}

More on a suite: dtrain bench engine --help."""
_DOCS_KEY = "bench.docs="


def main(argv: Sequence[str]) -> int:
    """Runs one suite, or the report; returns the exit code."""
    name, *rest = list(argv) or ["--help"]
    if name in ("-h", "--help"):
        print(_USAGE.format("\n".join(f"  {suite:12} {line}" for suite, line in _LINES.items())))
        return 0
    if name == "report":
        return _report(rest)
    if name not in SUITES:
        raise ConfigError(f"unknown suite '{name}'{nearest(name, _LINES)}")
    config = read_suite(rest, SUITES[name].primary)
    if config is None:
        return 0
    if name == "engine":
        check_peers(config.bench.peers or [], config.bench.ranks)
        check_engines(config.bench.engines or [], config.bench.ranks)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("dtrain bench starts its own ranks; start it once, without a launcher, and set bench.ranks")
    configure_logging(0)
    module, _, function = SUITES[name].run.partition(":")
    run = getattr(import_module(f"dtrain.measure.bench.{module}"), function)
    path = Path(config.bench.out or time.strftime(f"runs/bench-{name}-%Y-%m-%d_%H-%M-%S.json"))
    for results in run(config, command_text("bench", argv)):
        write_record(path, results)
    return _finish(results, path)


def _finish(results: AnyResults, path: Path) -> int:
    """Prints; returns 1 if something of dtrain failed. Peers may fail."""
    describe(results).print()
    logger.info("results in %s", path)
    if isinstance(results, TableResults):
        return 1 if results.failures else 0
    failures = [] if isinstance(results, OperationResults) else results.failures
    return 1 if any(failure.case.is_dtrain for failure in failures) else 0


def _report(argv: Sequence[str]) -> int:
    documents = [argument.removeprefix(_DOCS_KEY) for argument in argv if argument.startswith(_DOCS_KEY)]
    files = [Path(argument) for argument in argv if not argument.startswith(_DOCS_KEY)]
    other = next((str(path) for path in files if path.suffix != ".json"), None)
    if other is not None:
        raise ConfigError(f"'{other}' is not a .json file of `dtrain bench`")
    if not files:
        raise ConfigError("dtrain bench report needs results files, such as docs/results/*.json")
    document = Path(documents[-1] if documents else "docs/results/benchmarks.md")
    update_document(document, {path.stem: read_results(path) for path in sorted(files)})
    print(f"{document}: {len(files)} results")
    return 0
