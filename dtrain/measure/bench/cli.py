"""``dtrain bench SUITE key=value ...`` and ``dtrain bench report FILE ...``."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from dtrain.cli.resolve import read_suite
from dtrain.config.commands import (
    BENCH_BLOCKS,
    BENCH_CHECKPOINT,
    BENCH_COLLECTIVES,
    BENCH_DATA,
    BENCH_ENGINE,
    BENCH_FLOAT8,
    BENCH_LOSS_HEAD,
    BENCH_OPTIMIZER,
    BENCH_PRECISION,
    BENCH_TELEMETRY,
    BENCH_VOTE,
    Primary,
)
from dtrain.config.tool_schema import EngineSuiteConfig
from dtrain.distributed.logging import configure_logging, logger
from dtrain.errors import ConfigError, nearest
from dtrain.measure.bench.peers import check_peers
from dtrain.measure.bench.records import AnyResults, OperationResults, read_results, write_results
from dtrain.measure.bench.report.document import describe, update_document
from dtrain.measure.bench.training.cases import check_engines
from dtrain.tools.command import command_text

_USAGE = """usage: dtrain bench SUITE [key=value ...]
       dtrain bench report FILE.json ... [bench.docs=docs/benchmarks.md]

  engine       step time, memory and start of dtrain's engines against plain PyTorch, DDP, FSDP2, DeepSpeed, ...
  precision    speed and memory of mixed precision against FP32
  float8       FP8 against BF16 at several widths, and each of its products
  optimizer    the optimizer phase against torch's sequence of passes and the memory's bandwidth
  loss-head    output layer and loss by chunks of tokens, against full logits and torch's own function
  collectives  each collective of a step, through sockets and through shared memory
  checkpoint   stall of training during a save and time until it is complete, against torch's
  data         tokenizing, reading token shards, and packing documents against padding them
  vote         cost of the vote and of loss scaling in a step
  telemetry    cost of a sampled step, in which every gradient and update is measured
  blocks       step time and activations of recomputed and compiled blocks
  report       writes the tables of results files into a document, between their markers

More on a suite: dtrain bench engine --help."""
_DOCS_KEY = "bench.docs="
_SUITES: dict[str, tuple[Primary[Any], str, str]] = {
    "engine": (BENCH_ENGINE, "training.suites", "run_engine_suite"),
    "precision": (BENCH_PRECISION, "training.suites", "run_precision_suite"),
    "vote": (BENCH_VOTE, "training.suites", "run_vote_suite"),
    "telemetry": (BENCH_TELEMETRY, "training.suites", "run_telemetry_suite"),
    "blocks": (BENCH_BLOCKS, "training.suites", "run_blocks_suite"),
    "float8": (BENCH_FLOAT8, "training.float8", "run_float8_suite"),
    "optimizer": (BENCH_OPTIMIZER, "operations.optimizer", "run_optimizer_suite"),
    "loss-head": (BENCH_LOSS_HEAD, "operations.loss_head", "run_loss_head_suite"),
    "collectives": (BENCH_COLLECTIVES, "operations.collectives", "run_collectives_suite"),
    "checkpoint": (BENCH_CHECKPOINT, "operations.checkpoint", "run_checkpoint_suite"),
    "data": (BENCH_DATA, "operations.data", "run_data_suite"),
}
"""Name -> configuration, module and function. The module brings torch, so bad keys are reported before its import."""


def main(argv: Sequence[str]) -> int:
    """Runs one suite, or the report; returns the exit code."""
    name, *rest = list(argv) or ["--help"]
    if name in ("-h", "--help"):
        print(_USAGE)
        return 0
    if name == "report":
        return _report(rest)
    if name not in _SUITES:
        raise ConfigError(f"unknown suite '{name}'{nearest(name, [*_SUITES, 'report'])}")
    primary, module, function = _SUITES[name]
    config = read_suite(rest, primary)
    if config is None:
        return 0
    if isinstance(config, EngineSuiteConfig):
        check_peers(config.bench.peers or [], config.bench.ranks)
        check_engines(config.bench.engines or [], config.bench.ranks)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("dtrain bench starts its own ranks; start it once, without a launcher, and set bench.ranks")
    configure_logging(0)
    run = getattr(import_module(f"dtrain.measure.bench.{module}"), function)
    return _finish(run(config, command_text("bench", argv)), config.bench.out)


def _finish(results: AnyResults, out: str | None) -> int:
    """Writes and prints; returns 1 if an engine of dtrain failed. Peers may fail."""
    path = Path(out or time.strftime(f"runs/bench-{results.suite}-%Y-%m-%d_%H-%M-%S.json"))
    write_results(path, results)
    describe(results).print()
    logger.info("results in %s", path)
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
    document = Path(documents[-1] if documents else "docs/benchmarks.md")
    update_document(document, {path.stem: read_results(path) for path in sorted(files)})
    print(f"{document}: {len(files)} results")
    return 0
