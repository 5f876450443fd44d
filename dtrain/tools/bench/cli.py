"""``dtrain bench SUITE key=value ...`` and ``dtrain bench report FILE ...``."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dtrain.cli.resolve import read_suite
from dtrain.config.schema import (
    BENCH_CHECKPOINT,
    BENCH_COLLECTIVES,
    BENCH_ENGINE,
    BENCH_FLOAT8,
    BENCH_OPTIMIZER,
    BENCH_PRECISION,
    BENCH_VOTE,
)
from dtrain.distributed.logging import configure_logging, logger
from dtrain.errors import ConfigError, nearest
from dtrain.tools.bench.engines import check_engines
from dtrain.tools.bench.peers import check_peers
from dtrain.tools.bench.records import AnyResults, Timings, read_results, write_results
from dtrain.tools.bench.report import describe, update_document

_USAGE = """usage: dtrain bench SUITE [key=value ...]
       dtrain bench report FILE.json ... [bench.docs=docs/benchmarks.md]

  engine       step time, memory and start of dtrain's engines against plain PyTorch, DDP, FSDP2, DeepSpeed, ...
  precision    speed and memory of mixed precision against FP32
  float8       FP8 against BF16 at several widths, and each of its products
  optimizer    the optimizer phase against torch's sequence of passes and the memory's bandwidth
  collectives  each collective of a step, through sockets and through shared memory
  checkpoint   how long training stands still for a save, and how long it takes, against torch's
  vote         what the vote and loss scaling take of a step
  report       writes the tables of results files into a document, between their markers

More on a suite: dtrain bench engine --help."""
_DOCS_KEY = "bench.docs="


def main(argv: Sequence[str]) -> int:
    """Runs one suite, or the report; returns the exit code.

    Raises:
        DtrainError: a bad command line, or a measurement that failed.
    """
    suite, *rest = list(argv) or ["--help"]
    if suite in ("-h", "--help"):
        print(_USAGE)
        return 0
    if suite not in _SUITES:
        raise ConfigError(f"unknown suite '{suite}'{nearest(suite, _SUITES)}")
    return _SUITES[suite](rest)


def _engine(argv: Sequence[str]) -> int:
    config = read_suite(argv, BENCH_ENGINE)
    if config is None:
        return 0
    check_peers(config.bench.peers or [], config.bench.ranks)
    check_engines(config.bench.engines or [], config.bench.ranks)
    _require_one_process()
    from dtrain.tools.bench.suites import run_engine_suite  # brings torch; a misspelt key is reported without that wait

    return _finish(run_engine_suite(config, _command("engine", argv)), config.bench.out)


def _precision(argv: Sequence[str]) -> int:
    config = read_suite(argv, BENCH_PRECISION)
    if config is None:
        return 0
    _require_one_process()
    from dtrain.tools.bench.suites import run_precision_suite

    return _finish(run_precision_suite(config, _command("precision", argv)), config.bench.out)


def _float8(argv: Sequence[str]) -> int:
    config = read_suite(argv, BENCH_FLOAT8)
    if config is None:
        return 0
    _require_one_process()
    from dtrain.tools.bench.float8 import run_float8_suite

    return _finish(run_float8_suite(config, _command("float8", argv)), config.bench.out)


def _optimizer(argv: Sequence[str]) -> int:
    config = read_suite(argv, BENCH_OPTIMIZER)
    if config is None:
        return 0
    _require_one_process()
    from dtrain.tools.bench.optimizer import run_optimizer_suite

    return _finish(run_optimizer_suite(config, _command("optimizer", argv)), config.bench.out)


def _collectives(argv: Sequence[str]) -> int:
    config = read_suite(argv, BENCH_COLLECTIVES)
    if config is None:
        return 0
    _require_one_process()
    from dtrain.tools.bench.collectives import run_collectives_suite

    return _finish(run_collectives_suite(config, _command("collectives", argv)), config.bench.out)


def _checkpoint(argv: Sequence[str]) -> int:
    config = read_suite(argv, BENCH_CHECKPOINT)
    if config is None:
        return 0
    _require_one_process()
    from dtrain.tools.bench.checkpoint import run_checkpoint_suite

    return _finish(run_checkpoint_suite(config, _command("checkpoint", argv)), config.bench.out)


def _vote(argv: Sequence[str]) -> int:
    config = read_suite(argv, BENCH_VOTE)
    if config is None:
        return 0
    _require_one_process()
    from dtrain.tools.bench.suites import run_vote_suite

    return _finish(run_vote_suite(config, _command("vote", argv)), config.bench.out)


def _report(argv: Sequence[str]) -> int:
    documents = [word.removeprefix(_DOCS_KEY) for word in argv if word.startswith(_DOCS_KEY)]
    files = [Path(word) for word in argv if not word.startswith(_DOCS_KEY)]
    odd = next((str(path) for path in files if path.suffix != ".json"), None)
    if odd is not None:
        raise ConfigError(f"'{odd}' is not a .json file of `dtrain bench`")
    if not files:
        raise ConfigError("dtrain bench report needs results files, such as docs/results/*.json")
    document = Path(documents[-1] if documents else "docs/benchmarks.md")
    update_document(document, {path.stem: read_results(path) for path in sorted(files)})
    print(f"{document}: {len(files)} results")
    return 0


_SUITES: dict[str, Callable[[Sequence[str]], int]] = {
    "engine": _engine,
    "precision": _precision,
    "float8": _float8,
    "optimizer": _optimizer,
    "collectives": _collectives,
    "checkpoint": _checkpoint,
    "vote": _vote,
    "report": _report,
}


def _require_one_process() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("dtrain bench starts its own ranks; start it once, without a launcher, and set bench.ranks")
    configure_logging(0)


def _command(suite: str, argv: Sequence[str]) -> str:
    return shlex.join(["dtrain", "bench", suite, *argv])


def _finish(results: AnyResults, out: str | None) -> int:
    """Writes and prints; 1 where an engine of dtrain failed, since others may stay out."""
    path = Path(out or time.strftime(f"runs/bench-{results.suite}-%Y-%m-%d_%H-%M-%S.json"))
    write_results(path, results)
    print(describe(results), flush=True)
    logger.info("results in %s", path)
    absences = [] if isinstance(results, Timings) else results.absences
    return 1 if any(absence.contender.is_dtrain for absence in absences) else 0
