"""Runs the oracle and the engines, one after the other, and compares them step by step."""

from __future__ import annotations

import json
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
from dtrain.config.schema import ParitySuiteConfig, RunConfig
from dtrain.distributed.logging import logger
from dtrain.distributed.setup import choose_device
from dtrain.errors import ConfigError, ParityError, RankError
from dtrain.tools.parity.compare import BOUNDS, SKIP, Deviations, Given, Parting, first_parting, limits, measure
from dtrain.tools.parity.picture import draw
from dtrain.tools.parity.records import EngineResult, Report, write_report
from dtrain.tools.parity.trajectory import Point, Trajectory
from dtrain.tools.parity.worker import ORACLE, YARDSTICK, Order
from dtrain.tools.ranks import run_ranks
from dtrain.train.run_dir import CONFIG_FILE
from dtrain.train.setup import check_precision, make_policy

REPORT_FILE = "report.json"
PICTURE_FILE = "parity.png"
_WORKER = "dtrain.tools.parity.worker"


@dataclass(frozen=True)
class Reference:
    """What engines that skip the same steps are held against."""

    oracle: Trajectory
    yardstick: list[Point]
    yardstick_deviations: Deviations | None
    yardstick_failure: str | None


class References:
    """Plain training runs, made when they are first needed.

    Args:
        config: of the training run.
        folder: for their weights.
        logs: for what they say.
    """

    def __init__(self, config: RunConfig, folder: Path, logs: Path) -> None:
        self._config = config
        self._folder = folder
        self._logs = logs
        self._made: dict[tuple[int, ...], Reference] = {}

    def skipping(self, steps: tuple[int, ...] = ()) -> Reference:
        """The one that does not apply ``steps``, counted from 1.

        Raises:
            ParityError: it failed, or its numbers are not finite.
        """
        if steps not in self._made:
            self._made[steps] = self._make(steps)
        return self._made[steps]

    def _make(self, steps: tuple[int, ...]) -> Reference:
        name = f"{ORACLE}-{len(self._made)}"
        folder = self._folder / name
        order = Order(str(folder), config_to_dict(self._config), skipped=steps)
        begin = time.perf_counter()
        threads = self._config.launch.threads_per_rank or 1
        try:
            (answer,) = run_ranks(_WORKER, [json.dumps(asdict(order))], threads=threads, folder=self._logs / name)
        except RankError as error:
            raise ParityError(f"the oracle, plain PyTorch in FP32, cannot train this model: {error}") from error
        oracle, yardstick = Trajectory(folder / ORACLE), Trajectory(folder / YARDSTICK)
        curve = oracle.curve()
        check_oracle(curve)
        logger.info("oracle: %d steps in FP32, %.1f s", len(curve), time.perf_counter() - begin)
        failure = json.loads(answer).get(YARDSTICK)
        if failure is not None:
            logger.warning("no yardstick, the bounds alone decide: plain PyTorch cannot do this: %s", failure)
            return Reference(oracle, [], None, failure)
        deviations, points = measure(yardstick, oracle), yardstick.curve()
        shutil.rmtree(folder / YARDSTICK)
        return Reference(oracle, points, deviations, None)


def run_parity(config: ParitySuiteConfig, command: str) -> tuple[Report, Path]:
    """Compares; returns what was found, and the folder in which the report, the picture and the logs are.

    Raises:
        ConfigError: an engine that was asked for cannot do this here.
        ParityError: there is nothing to compare with.
    """
    parity = config.parity
    device = choose_device(parity.device, parity.ranks - 1)
    precision = make_policy(config.training("native")).on(device).name
    engines, left_out = _choose_engines(config, precision, device)
    config = replace(config, precision=replace(config.precision, name=precision))
    run_dir = _make_run_dir(config.run_dir)
    (run_dir / CONFIG_FILE).write_text(to_yaml(config_to_dict(config)), encoding="utf-8")
    logger.info("run %s", run_dir)
    for name, reason in left_out.items():
        logger.warning("left out: %s: %s", name, reason)
    with tempfile.TemporaryDirectory(dir=run_dir, prefix="weights-") as folder:
        references = References(config.training(engines[0]), Path(folder), run_dir / "logs")
        reference = references.skipping()
        results = [run_engine(config, name, references, Path(folder), run_dir / "logs") for name in engines]
        num_parameters = sum(reference.oracle.weight(name, 0).numel() for name in reference.oracle.names())
        report = Report(
            command=command,
            date=time.strftime("%Y-%m-%dT%H:%M:%S"),
            precision=precision,
            num_parameters=num_parameters,
            config=config_to_dict(config),
            oracle=reference.oracle.curve(),
            yardstick=reference.yardstick,
            yardstick_deviations=reference.yardstick_deviations,
            yardstick_failure=reference.yardstick_failure,
            engines=results,
            left_out=left_out,
        )
    write_report(run_dir / REPORT_FILE, report)
    draw(report, run_dir / PICTURE_FILE)
    return report, run_dir


def check_oracle(curve: Sequence[Point]) -> None:
    """Refuses an oracle that nothing can be held against.

    Raises:
        ParityError: naming the first step whose loss or gradient norm is not finite.
    """
    for step, point in enumerate(curve, start=1):
        if not (math.isfinite(point.loss) and math.isfinite(point.grad_norm)):
            raise ParityError(
                f"the oracle's own loss is {point.loss} and its gradient norm {point.grad_norm} at step {step}, so "
                f"nothing can be held against it; lower optim.lr, or look at the model"
            )


def _choose_engines(
    config: ParitySuiteConfig, precision: str, device: torch.device
) -> tuple[list[str], dict[str, str]]:
    """Those asked for, else all that can; and why others cannot."""
    chosen, left_out = [], {}
    for name in config.parity.engines or CAPABILITIES:
        try:
            check(name, precision=precision, device_type=device.type, compile=config.optim.compile)
        except ConfigError as error:
            if config.parity.engines is not None:
                raise
            left_out[name] = str(error)
            continue
        check_parity_engine(config, name)
        check_precision(config.training(name), device)
        chosen.append(name)
    return chosen, left_out


def _make_run_dir(given: str | None) -> Path:
    path = Path(given or time.strftime("runs/parity-%Y-%m-%d_%H-%M-%S")).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir={error.filename} cannot be created: {error.strerror}; choose another") from error
    return path


def run_engine(config: ParitySuiteConfig, name: str, references: References, folder: Path, logs: Path) -> EngineResult:
    """Trains with one engine on ranks of its own, and compares; an engine that fails is a result too.

    Args:
        config: with the precision resolved.
        name: of the engine.
        references: what it is held against.
        folder: for its weights, which are deleted at the end.
        logs: for what its ranks say.
    """
    parity, training = config.parity, config.training(name)
    own = folder / name
    order = Order(str(own), config_to_dict(training), name, ranks=parity.ranks, store=str(folder / f"{name}-store"))
    orders = [json.dumps(asdict(replace(order, rank=rank))) for rank in range(parity.ranks)]
    result = EngineResult(name, training.engine.zero_stage, 0.0)
    begin = time.perf_counter()
    try:
        run_ranks(_WORKER, orders, threads=parity.threads_per_rank, folder=logs / name)
    except RankError as error:
        logger.error("%s failed: %s", name, error)
        return replace(result, seconds=time.perf_counter() - begin, failure=str(error))
    seconds = time.perf_counter() - begin
    result = _compare(replace(result, seconds=seconds), Trajectory(own), config, references)
    shutil.rmtree(own)
    plural = "s" if parity.ranks > 1 else ""
    logger.info(
        "%s: %d steps on %d rank%s, %.1f s: %s", name, parity.steps, parity.ranks, plural, seconds, result.verdict
    )
    return result


def _compare(result: EngineResult, run: Trajectory, config: ParitySuiteConfig, references: References) -> EngineResult:
    curve = run.curve()
    result = replace(result, curve=curve)
    skipped = tuple(step for step, point in enumerate(curve, start=1) if point.reason is not None)
    if len(skipped) == len(curve):
        return replace(result, failure=f"it skipped every step: {curve[0].reason}")
    # what a dynamic loss scale tries out is no fault: the oracle skips the same steps
    tried = skipped if _scale_is_dynamic(config) else ()
    excused = tuple(step for step in tried if curve[step - 1].reason == "overflow")
    faults = [step for step in skipped if step not in excused]
    reference = references.skipping(excused)
    if run.names() != reference.oracle.names():
        odd = sorted(set(run.names()) ^ set(reference.oracle.names()))
        return replace(result, failure=f"its masters and the model's trained parameters differ in '{odd[0]}'")
    given = Given(config.parity.loss_bound, config.parity.weight_bound)
    allowed = limits(BOUNDS[config.precision.name], reference.oracle, reference.yardstick_deviations, given=given)
    deviations = measure(run, reference.oracle)
    parting = first_parting(deviations, allowed)
    if faults and (parting is None or parting.step >= faults[0]):
        parting = Parting(faults[0], SKIP, reason=curve[faults[0] - 1].reason)
    return replace(result, deviations=deviations, allowed=allowed, parting=parting)


def _scale_is_dynamic(config: ParitySuiteConfig) -> bool:
    mode = config.precision.loss_scale.mode
    return mode == "dynamic" or (mode == "auto" and config.precision.name == "fp16")
