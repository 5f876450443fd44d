"""Runs the oracle and the engines, one after the other, and compares them step by step."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from dtrain.cli.checks import check_parity_engine
from dtrain.config.capabilities import CAPABILITIES, check
from dtrain.config.dump import config_to_dict, to_yaml
from dtrain.config.schema import RunConfig
from dtrain.config.tool_schema import ParitySuiteConfig
from dtrain.distributed.logging import logger
from dtrain.distributed.startup.setup import choose_device
from dtrain.errors import ConfigError, ParityError, RankError
from dtrain.measure.parity.compare import (
    BOUNDS,
    SKIP,
    Deviations,
    Mismatch,
    Point,
    Trajectory,
    first_mismatch,
    make_limits,
    measure,
)
from dtrain.measure.parity.curves import CurvesReport, run_curves
from dtrain.measure.parity.picture import draw
from dtrain.measure.parity.records import REPORT_FILE, EngineResult, ParityReport
from dtrain.measure.parity.worker import NOISE_BASELINE, ORACLE
from dtrain.measure.ranks import run_ranks
from dtrain.measure.record import head, write_record
from dtrain.measure.worker import Rank
from dtrain.redaction.redact import redact
from dtrain.telemetry.metrics import CONFIG_FILE, write_atomically
from dtrain.tools.report_dir import make_run_dir
from dtrain.tools.tables import plural
from dtrain.train.setup import check_precision, make_policy

PICTURE_FILE = "parity.png"
_WORKER = "dtrain.measure.parity.worker"


@dataclass(frozen=True)
class Reference:
    """The oracle and the noise baseline for engines that skip the same steps."""

    oracle: Trajectory
    noise_baseline: list[Point]
    noise_deviations: Deviations | None
    noise_failure: str | None


class ReferenceRuns:
    """Plain training runs, made on first use and then cached; ``folder`` takes their weights."""

    def __init__(self, config: RunConfig, folder: Path, logs: Path) -> None:
        self._config = config
        self._folder = folder
        self._logs = logs
        self._cache: dict[tuple[int, ...], Reference] = {}

    def skipping(self, steps: tuple[int, ...] = ()) -> Reference:
        """Returns the reference that does not apply ``steps``, counted from 1.

        Raises:
            ParityError: the oracle failed, or its numbers are not finite.
        """
        if steps not in self._cache:
            self._cache[steps] = self._train(steps)
        return self._cache[steps]

    def _train(self, steps: tuple[int, ...]) -> Reference:
        name = f"{ORACLE}-{len(self._cache)}"
        folder, config = self._folder / name, self._config
        job = {"folder": str(folder), "config": config_to_dict(config), "skipped": steps}
        launch, begin = config.launch, time.perf_counter()
        rank = Rank(job, device=launch.device, threads=launch.threads_per_rank, timeout_s=launch.timeout_s)
        try:
            (failure,) = run_ranks(f"{_WORKER}:train_plainly", rank, folder=self._logs / name)
        except RankError as error:
            raise ParityError(f"the oracle, plain PyTorch in FP32, cannot train this model: {error}") from error
        oracle, noise_baseline = Trajectory(folder / ORACLE), Trajectory(folder / NOISE_BASELINE)
        curve = oracle.curve()
        check_oracle(curve)
        logger.info("oracle: %d steps in FP32, %.1f s", len(curve), time.perf_counter() - begin)
        if failure:
            logger.warning("no noise baseline, the bounds alone decide: plain PyTorch cannot run this: %s", failure)
            return Reference(oracle, [], None, failure)
        deviations, points = measure(noise_baseline, oracle), noise_baseline.curve()
        shutil.rmtree(folder / NOISE_BASELINE)
        return Reference(oracle, points, deviations, None)


def run_parity(config: ParitySuiteConfig, command: str) -> tuple[ParityReport | CurvesReport, Path]:
    """Compares the engines; returns the report, and the folder with report, picture and logs."""
    parity = config.parity
    device = choose_device(parity.device, parity.ranks - 1)
    precision = make_policy(config.training("native")).on(device).name
    if config.parity.reference == "cpu":
        return run_curves(replace(config, precision=replace(config.precision, name=precision)), device, command)
    engines, left_out = _choose_engines(config, precision, device)
    config = replace(config, precision=replace(config.precision, name=precision))
    run_dir = make_run_dir(config.run_dir, "parity")
    write_atomically(run_dir / CONFIG_FILE, to_yaml(redact(config_to_dict(config))))
    logger.info("run %s", run_dir)
    for name, reason in left_out.items():
        logger.warning("left out: %s: %s", name, reason)
    with tempfile.TemporaryDirectory(dir=run_dir, prefix="weights-") as folder:
        references = ReferenceRuns(config.training(engines[0]), Path(folder), run_dir / "logs")
        reference = references.skipping()
        results = [run_engine(config, name, references, Path(folder), run_dir / "logs") for name in engines]
        num_parameters = sum(reference.oracle.weight(name, 0).numel() for name in reference.oracle.names())
        report = ParityReport(
            **head(command, config),
            precision=precision,
            num_parameters=num_parameters,
            oracle=reference.oracle.curve(),
            noise_baseline=reference.noise_baseline,
            noise_deviations=reference.noise_deviations,
            noise_failure=reference.noise_failure,
            engines=results,
            left_out=left_out,
        )
    entries = [{**asdict(result), "summary": result.summary} for result in results]
    write_record(run_dir / REPORT_FILE, report, engines=entries, agrees=report.agrees)
    draw(report, run_dir / PICTURE_FILE)
    return report, run_dir


def check_oracle(curve: Sequence[Point]) -> None:
    """Raises ParityError at the first loss or gradient norm that is not finite."""
    for step, point in enumerate(curve, start=1):
        if not (math.isfinite(point.loss) and math.isfinite(point.grad_norm)):
            raise ParityError(
                f"the oracle's loss is {point.loss} and its gradient norm {point.grad_norm} at step {step}, so engines "
                f"cannot be compared with it; lower optim.lr, or check the model"
            )


def _choose_engines(
    config: ParitySuiteConfig, precision: str, device: torch.device
) -> tuple[list[str], dict[str, str]]:
    """Returns the requested engines, by default all that can run; and the reasons of those left out."""
    chosen, left_out = [], {}
    for name in config.parity.engines or CAPABILITIES:
        try:
            check(name, precision=precision, device_type=device.type, compile=getattr(config.optim, "compile", "auto"))
        except ConfigError as error:
            if config.parity.engines is not None:
                raise
            left_out[name] = str(error)
            continue
        check_parity_engine(config, name)
        check_precision(config.training(name), device)
        chosen.append(name)
    return chosen, left_out


def run_engine(
    config: ParitySuiteConfig, name: str, references: ReferenceRuns, folder: Path, logs: Path
) -> EngineResult:
    """Trains one engine on its own ranks and compares it; a failure is a result too.

    Args:
        config: configuration with the precision resolved.
        folder: folder for its weights, which are deleted at the end.
    """
    parity, training = config.parity, config.training(name)
    weights = folder / name
    job = {"folder": str(weights), "config": config_to_dict(training)}
    rank = Rank(job, 0, parity.ranks, "", parity.device, parity.threads_per_rank, parity.timeout_s)
    result = EngineResult(name, training.engine.zero_stage, 0.0)
    begin = time.perf_counter()
    try:
        run_ranks(f"{_WORKER}:train_engine", rank, folder=logs / name)
    except RankError as error:
        logger.error("%s failed: %s", name, error)
        return replace(result, seconds=time.perf_counter() - begin, failure=str(error))
    seconds = time.perf_counter() - begin
    result = _compare(replace(result, seconds=seconds), Trajectory(weights), config, references)
    shutil.rmtree(weights)
    ranks = plural(parity.ranks, "rank")
    logger.info("%s: %d steps on %s, %.1f s: %s", name, parity.steps, ranks, seconds, result.summary)
    return result


def _compare(
    result: EngineResult, run: Trajectory, config: ParitySuiteConfig, references: ReferenceRuns
) -> EngineResult:
    curve = run.curve()
    result = replace(result, curve=curve)
    skipped = tuple(step for step, point in enumerate(curve, start=1) if point.reason is not None)
    if len(skipped) == len(curve):
        return replace(result, failure=f"it skipped every step: {curve[0].reason}")
    # overflows while a dynamic loss scale finds its range are no fault: the oracle skips the same steps
    dynamic = _scale_is_dynamic(config)
    expected = tuple(step for step in skipped if dynamic and curve[step - 1].reason == "overflow")
    unexpected = [step for step in skipped if step not in expected]
    reference = references.skipping(expected)
    if run.names() != reference.oracle.names():
        different = sorted(set(run.names()) ^ set(reference.oracle.names()))
        return replace(result, failure=f"its masters and the model's trained parameters differ in '{different[0]}'")
    limits = make_limits(
        BOUNDS[config.precision.name],
        reference.oracle,
        reference.noise_deviations,
        loss_bound=config.parity.loss_bound,
        weight_bound=config.parity.weight_bound,
    )
    deviations = measure(run, reference.oracle)
    mismatch = first_mismatch(deviations, limits)
    if unexpected and (mismatch is None or mismatch.step >= unexpected[0]):
        mismatch = Mismatch(unexpected[0], SKIP, reason=curve[unexpected[0] - 1].reason)
    return replace(result, deviations=deviations, limits=limits, mismatch=mismatch)


def _scale_is_dynamic(config: ParitySuiteConfig) -> bool:
    mode = config.precision.loss_scale.mode
    return mode == "dynamic" or (mode == "auto" and config.precision.name == "fp16")
