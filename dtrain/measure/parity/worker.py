"""One process of ``dtrain parity``: a rank of an engine, or the plain training that engines are compared with."""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch

from dtrain.config.dump import config_from_dict, from_plain
from dtrain.config.optim import OptimConfig
from dtrain.config.schema import RunConfig
from dtrain.data import BatchLoader, Dataset, load_dataset
from dtrain.device import synchronize
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.logging import configure_logging
from dtrain.distributed.startup.launch_env import LaunchEnv
from dtrain.distributed.startup.setup import (
    choose_device,
    connect,
    connect_by_file,
    disconnect,
    ensure_process_group,
)
from dtrain.engine.rng import rng_key
from dtrain.errors import ConfigError
from dtrain.measure.parity.oracle import PlainTraining
from dtrain.measure.parity.trajectory import Point, Trajectory
from dtrain.measure.worker import Rank
from dtrain.models import build_model
from dtrain.precision.contract import resolve
from dtrain.precision.forward import set_matmul_precision
from dtrain.precision.policy import PrecisionPolicy
from dtrain.tools.processes import failure_reason, open_result, read_job
from dtrain.train.session import Session
from dtrain.train.setup import (
    check_inputs,
    check_patterns,
    make_engine,
    make_loader,
    make_policy,
    set_threads,
    torch_settings_restored,
)
from dtrain.train.validation import to_device

ORACLE, NOISE_BASELINE = "oracle", "noise_baseline"


@dataclass(frozen=True)
class ParityJob:
    """The job of one process.

    Attributes:
        folder: rank 0 writes the engine's trajectory here; plain training writes its two trajectories below it.
        config: configuration of the training run, as plain values.
        engine: None: plain training, the oracle and then the noise baseline.
        store: file at which the engine's ranks meet.
        skipped: steps, counted from 1, that plain training does not apply.
    """

    folder: str
    config: dict[str, Any]
    engine: str | None = None
    rank: int = 0
    ranks: int = 1
    store: str = ""
    skipped: tuple[int, ...] = ()


def main() -> int:
    """Runs the job; the result is JSON, or the reason of a failure."""
    job = from_plain(ParityJob, json.loads(read_job()))
    result = open_result()
    try:
        json.dump(run_job(job), result)
    except Exception as error:  # any error of a library goes into the report, and the other engines still run
        traceback.print_exc()
        result.write(failure_reason(error))
        return 1
    finally:
        result.close()
    return 0


def run_job(job: ParityJob) -> dict[str, str]:
    """Runs the job in this process; returns the reason under :data:`NOISE_BASELINE` if the baseline cannot run."""
    config = config_from_dict(job.config)
    if job.engine is None:
        return _train_plainly(job, config)
    _train_with_engine(job, config)
    return {}


def train_cases(rank: Rank) -> Generator[dict[str, Any], Mapping[str, Any], None]:
    """Trains each run that it is asked for; yields its losses, or the reason why there are none."""
    device = rank.torch_device()
    if device.type == "cuda":
        ensure_process_group(device)  # so that NCCL is at work on a single rank too
    datasets: list[Dataset] = []  # all runs have the same
    request = yield {}
    while True:
        try:
            with torch_settings_restored():
                found = _losses(config_from_dict(request), connect(device, timeout_s=rank.timeout_s), datasets)
        except ConfigError as error:
            found = {"status": "left out", "reason": failure_reason(error)}
        except Exception as error:  # any error of a library is a result, and the other runs still train
            if rank.ranks > 1:  # the others may wait for this one
                raise
            traceback.print_exc()
            found = {"status": "failed", "reason": failure_reason(error)}
        gc.collect()  # an engine has cycles through its hooks
        if device.type == "cuda":
            torch.cuda.empty_cache()
        request = yield {**found, "works": _works(device)}


def _losses(config: RunConfig, comm: Communicator, datasets: list[Dataset]) -> dict[str, Any]:
    session = Session.open(config, comm, dataset=datasets[0] if datasets else None)
    datasets[:] = [session.dataset]
    outcomes = [session.step() for _ in range(config.train.steps)]
    skipped = [f"skipped step {step}: {outcome.reason}" for step, outcome in enumerate(outcomes, 1) if outcome.reason]
    return {"losses": [outcome.loss for outcome in outcomes], "skipped": skipped[0] if skipped else ""}


def _works(device: torch.device) -> bool:
    """Whether the device answers: an illegal access fails every later call of its process."""
    try:
        synchronize(device)
    except RuntimeError:
        return False
    return True


def _train_with_engine(job: ParityJob, config: RunConfig) -> None:
    configure_logging(job.rank)
    device = choose_device(config.launch.device, job.rank)
    if job.ranks > 1:
        LaunchEnv(job.rank, job.ranks, job.rank, job.ranks).export()  # libraries read these variables
    connect_by_file(job.store, job.rank, job.ranks, device, config.launch.timeout_s)
    comm = connect(device, timeout_s=config.launch.timeout_s)
    set_threads(config, comm)
    dataset = load_dataset(config.data, config.model.max_seq_len)
    model = build_model(config.model, dataset.task, config.seed)
    check_patterns(config, model)
    check_inputs(model, dataset)
    engine = make_engine(config, model, comm)
    loader = make_loader(config, dataset, engine)
    trajectory = Trajectory(Path(job.folder))
    start = engine.master_state()
    if job.rank == 0:
        trajectory.start(start)
    for _ in range(config.train.steps):
        for micro_batch in engine.accumulate(next(loader)):
            engine.backward(engine(**to_device(micro_batch, device)))
        outcome = engine.step()
        masters = engine.master_state()
        if job.rank == 0:
            trajectory.add(Point(outcome.loss, outcome.grad_norm, outcome.reason, outcome.loss_scale), masters)
    comm.release()
    disconnect()


def _train_plainly(job: ParityJob, config: RunConfig) -> dict[str, str]:
    torch.set_num_threads(config.launch.threads_per_rank or 1)
    device = choose_device(config.launch.device, 0)
    dataset = load_dataset(config.data, config.model.max_seq_len)
    policy = make_policy(config)
    fp32 = PrecisionPolicy.named("fp32")
    _train(job, config, ORACLE, _plain_training(config, dataset, device, fp32, perturbation=0.0), dataset)
    try:
        perturbed = _plain_training(config, dataset, device, policy, perturbation=torch.finfo(torch.float32).eps)
        _train(job, config, NOISE_BASELINE, perturbed, dataset)
    except Exception as error:  # plain autocast fails on some models that engines train
        traceback.print_exc()
        return {NOISE_BASELINE: failure_reason(error)}
    return {}


def _plain_training(
    config: RunConfig, dataset: Dataset, device: torch.device, policy: PrecisionPolicy, *, perturbation: float
) -> PlainTraining:
    set_matmul_precision(policy)
    model = build_model(config.model, dataset.task, config.seed).float().to(device)
    return PlainTraining(
        model,
        cast(OptimConfig, config.optim),  # checked by cli.checks
        lambda step, index: torch.manual_seed(rng_key(config.seed, step, index)),
        compute_dtype=policy.compute_dtype if policy.is_reduced_precision else None,
        perturbation=perturbation,
        float8_linears=resolve(policy, model).float8_modules,
    )


def _train(job: ParityJob, config: RunConfig, name: str, training: PlainTraining, dataset: Dataset) -> None:
    schedule = config.schedule.over(config.train.steps)
    trajectory = Trajectory(Path(job.folder, name))
    trajectory.start(training.weights())
    train = config.train
    # one loader for the micro-batches of all ranks, in the order of their global index
    num_micro_batches = train.global_batch_size // train.micro_batch_size
    loader = BatchLoader(dataset.train, config.seed, train.micro_batch_size, num_micro_batches)
    for step, micro_batches in enumerate(islice(loader, train.steps), start=1):
        lr = config.optim.lr * schedule.factor(training.applied_steps)
        on_device = [to_device(micro_batch, training.device) for micro_batch in micro_batches]
        loss, grad_norm = training.step(on_device, lr, skip=step in job.skipped)
        trajectory.add(Point(loss, grad_norm), training.weights())


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the result is written; a library thread that fails at exit must not abort this rank
