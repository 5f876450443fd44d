"""Losses of engines, ZeRO stages and precisions on a device, compared with the native engine's in FP32 on the CPU."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from dtrain.cli.checks import check_parity_engine
from dtrain.config.capabilities import CAPABILITIES, check
from dtrain.config.dump import config_to_dict, to_yaml
from dtrain.config.engines import Native
from dtrain.config.precision import LossScale, PrecisionConfig
from dtrain.config.schema import RunConfig
from dtrain.config.tool_schema import ParitySuiteConfig
from dtrain.distributed.logging import logger
from dtrain.errors import ConfigError, ParityError, RankError
from dtrain.measure.parity.compare import BOUNDS, relative
from dtrain.measure.parity.records import REPORT_FILE
from dtrain.measure.ranks import Ranks
from dtrain.measure.record import RecordHead, head, read_record, write_record
from dtrain.measure.worker import Rank
from dtrain.telemetry.metrics import CONFIG_FILE, write_atomically
from dtrain.tools.report_dir import make_run_dir
from dtrain.train.setup import check_precision

LOSS_BOUNDS = {name: bounds.loss for name, bounds in BOUNDS.items()} | {"fp32": 5e-5}
"""Largest ``|loss - CPU's| / CPU's`` of any step: more in FP32, because a GPU sums in another order than a CPU."""

AGREES, DEVIATES, FAILED, LEFT_OUT = "agrees", "deviates", "failed", "left out"
_STARTS = 3  # of one engine's ranks, after which its other cases are left out
_FP16_SCALE = LossScale("static", init=1024.0)  # a dynamic scale would begin with skipped steps
_WORKER = "dtrain.measure.parity.worker:train_cases"


@dataclass(frozen=True)
class Case:
    """One engine at one stage in one precision, and its result.

    Attributes:
        status: ``agrees``, ``deviates``, ``failed``, ``left out`` (not supported here), or empty without a result.
        deviation: the largest of any step; None if it is not finite, or was not measured.
        bound: of the deviation.
        reason: of a status other than ``agrees``.
        seconds: of the training, without the start of its ranks.
        losses: of each step; None for a number that is not finite.
    """

    engine: str
    zero_stage: int
    precision: str
    status: str = ""
    deviation: float | None = None
    bound: float | None = None
    reason: str = ""
    seconds: float = 0.0
    losses: list[float | None] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.engine} {self.precision}, stage {self.zero_stage}"


@dataclass(frozen=True, kw_only=True)
class CurvesReport(RecordHead):
    """Result of ``dtrain parity parity.reference=cpu``.

    Attributes:
        reference: losses on the CPU.
        rows: cases with a result: those that cannot run here, then the others in the order of their training.
    """

    reference: list[float] = field(default_factory=list)
    rows: list[Case] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        return all(row.status in (AGREES, LEFT_OUT) for row in self.rows)


def run_curves(config: ParitySuiteConfig, device: torch.device, command: str) -> tuple[CurvesReport, Path]:
    """Trains all cases, or those that ``config.run_dir`` does not have yet; the report is written after each one.

    Args:
        config: configuration with the precision resolved.
        device: of the cases.
        command: the command line.

    Returns:
        The report and its folder.

    Raises:
        ConfigError: no case can run here, or the folder holds something else.
        ParityError: the CPU cannot train the model.
    """
    planned = list(_plan(config, device))
    left_out = [replace(case, status=LEFT_OUT, reason=run) for case, run in planned if isinstance(run, str)]
    if len(left_out) == len(planned):
        raise ConfigError(f"no case can run here: {left_out[0].reason if left_out else 'no engine has these stages'}")
    report = _continued(CurvesReport(**head(command, config)), config.run_dir)
    run_dir = Path(config.run_dir or "").absolute() if report.reference else make_run_dir(config.run_dir, "parity")
    write_atomically(run_dir / CONFIG_FILE, to_yaml(report.config))
    logger.info("run %s", run_dir)
    for row in left_out:
        logger.warning("left out: %s: %s", row.name, row.reason)
    logs, path = run_dir / "logs", run_dir / REPORT_FILE
    reference = report.reference or _reference_losses(config, logs)
    done = {row.name for row in report.rows}
    report = replace(report, reference=reference, rows=[*left_out, *report.rows])
    write_record(path, report, agrees=report.agrees)
    runs = [(case, run) for case, run in planned if isinstance(run, RunConfig) and case.name not in done]
    for engine, own in groupby(runs, key=lambda item: item[0].engine):
        for case, found in _train_all(list(own), config, logs / engine):
            bound = config.parity.loss_bound
            row = _result(case, found, reference, LOSS_BOUNDS[case.precision] if bound is None else bound)
            logger.info("%s %s%s, %.1f s", row.name, row.status, row.reason and f": {row.reason}", row.seconds)
            report = replace(report, rows=[*report.rows, row])
            write_record(path, report, agrees=report.agrees)
    return report, run_dir


def _continued(report: CurvesReport, run_dir: str | None) -> CurvesReport:
    """Returns ``report`` with the results of the same configuration and machine in ``run_dir``, except failures."""
    path = Path(run_dir or "", REPORT_FILE)
    if run_dir is None or not path.is_file():
        return report
    earlier = read_record(path, CurvesReport, "parity parity.reference=cpu")
    if (earlier.config, earlier.host) != (report.config, report.host):
        return report  # the folder is then refused because it is not empty
    rows = [row for row in earlier.rows if row.status in (AGREES, DEVIATES)]
    return replace(report, reference=earlier.reference, rows=rows)


def _plan(config: ParitySuiteConfig, device: torch.device) -> Iterator[tuple[Case, RunConfig | str]]:
    """Yields each case in order with its run, or the reason why it cannot run here."""
    for engine in config.parity.engines or CAPABILITIES:
        own = getattr(config.engines, engine)
        for stage in config.parity.stages or [own.zero_stage]:
            for precision in config.parity.precisions or [config.precision.name]:
                if not CAPABILITIES[engine].supports("zero_stage", stage):
                    continue
                try:
                    run = _run(config, replace(own, zero_stage=stage), precision, device)
                    yield Case(engine, stage, precision), run
                except ConfigError as error:
                    yield Case(engine, stage, precision), str(error)


def _run(config: ParitySuiteConfig, engine: Any, precision: str, device: torch.device) -> RunConfig:
    """Returns a checked run; raises ConfigError if it cannot run on ``device``."""
    check(engine.name, zero_stage=engine.zero_stage, precision=precision, device_type=device.type)
    given = config.precision.loss_scale
    scale = _FP16_SCALE if precision == "fp16" and given == LossScale() else given
    config = replace(
        config,
        engines=replace(config.engines, **{engine.name: engine}),
        precision=replace(config.precision, name=precision, loss_scale=scale),
    )
    check_parity_engine(config, engine.name)
    run = config.training(engine.name)
    check_precision(run, device)
    return run


def _reference_losses(config: ParitySuiteConfig, logs: Path) -> list[float]:
    config = replace(
        config,
        parity=replace(config.parity, ranks=1, device="cpu"),
        engines=replace(config.engines, native=Native(zero_stage=2)),
        precision=PrecisionConfig("fp32"),
    )
    ((_, found),) = _train_all([(Case("native", 2, "fp32"), config.training("native"))], config, logs / "cpu")
    losses: list[float] = found.get("losses", [])
    if "losses" not in found or found["skipped"] or not all(map(math.isfinite, losses)):
        reason = found.get("reason") or found["skipped"] or "a loss is not finite"
        raise ParityError(f"the CPU cannot train this model with engine=native in FP32: {reason}")
    logger.info("CPU: %d steps in FP32, %.1f s", len(losses), found["seconds"])
    return losses


def _train_all(
    runs: Sequence[tuple[Case, RunConfig]], config: ParitySuiteConfig, logs: Path
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Yields what the ranks found in one engine's cases; one that ends them costs only itself: new ones do the rest."""
    parity, left = config.parity, list(runs)
    rank = Rank(ranks=parity.ranks, device=parity.device, threads=parity.threads_per_rank, timeout_s=parity.timeout_s)
    for number in range(1, _STARTS + 1):
        works, begin = True, time.monotonic()
        try:
            with Ranks(_WORKER, rank, folder=logs if number == 1 else logs / f"start-{number}") as ranks:
                ranks.results(parity.timeout_s)
                while works and left:
                    begin = time.monotonic()
                    found = ranks.request(config_to_dict(left[0][1]), parity.timeout_s)[0]
                    works = found["works"]
                    yield left.pop(0)[0], {**found, "seconds": time.monotonic() - begin}
        except RankError as error:
            seconds = time.monotonic() - begin
            yield left.pop(0)[0], {"status": FAILED, "reason": str(error), "seconds": seconds}
        if not left:
            return
    for case, _ in left:
        yield case, {"status": LEFT_OUT, "reason": f"the ranks of its engine have failed {_STARTS} times"}


def _result(case: Case, found: Mapping[str, Any], reference: Sequence[float], bound: float) -> Case:
    """Returns ``case`` with what its ranks found, compared with the losses of ``reference``."""
    case = replace(case, seconds=found.get("seconds", 0.0), reason=found.get("reason", ""))
    if "losses" not in found:
        return replace(case, status=found["status"])
    losses: list[float] = found["losses"]
    deviations = [relative(loss, other) for loss, other in zip(losses, reference, strict=True)]
    worst = max(deviations, key=lambda value: math.inf if math.isnan(value) else value)
    reason = found["skipped"]
    if not reason and not worst <= bound:
        step = next(number for number, value in enumerate(deviations, start=1) if not value <= bound)
        reason = f"the loss is off by {worst:.2g}, first beyond {bound:g} at step {step}"
    status = DEVIATES if reason else AGREES
    return replace(case, status=status, deviation=worst, bound=bound, reason=reason, losses=list(losses))
