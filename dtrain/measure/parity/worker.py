"""One process of ``dtrain parity``: a rank of an engine, or the plain training that engines are compared with."""

from __future__ import annotations

import traceback
from collections.abc import Generator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch

from dtrain.config.dump import config_from_dict
from dtrain.config.optim import OptimConfig
from dtrain.config.schema import RunConfig
from dtrain.data import BatchLoader, Dataset, load_dataset
from dtrain.device import free_memory, synchronize
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.startup.setup import (
    connect,
    ensure_process_group,
)
from dtrain.engine.rng import rng_key
from dtrain.errors import ConfigError
from dtrain.measure.parity.compare import Point, Trajectory
from dtrain.measure.parity.oracle import PlainTraining
from dtrain.measure.worker import Rank
from dtrain.models import build_model
from dtrain.precision.contract import resolve
from dtrain.precision.forward import set_matmul_precision
from dtrain.precision.policy import PrecisionPolicy
from dtrain.tools.processes import failure_reason
from dtrain.train.session import Session
from dtrain.train.setup import (
    make_policy,
    torch_settings_restored,
)
from dtrain.train.validation import to_device

ORACLE, NOISE_BASELINE = "oracle", "noise_baseline"


def train_engine(rank: Rank) -> None:
    """Trains the engine of ``job["config"]``; the first rank writes its trajectory to ``job["folder"]``."""
    session = Session.open(config_from_dict(rank.job["config"]), connect(rank.torch_device(), timeout_s=rank.timeout_s))
    engine, trajectory = session.engine, Trajectory(Path(rank.job["folder"]))
    masters = engine.master_state()
    if rank.rank == 0:
        trajectory.start(masters)
    for _ in range(session.config.train.steps):
        outcome = session.step()
        masters = engine.master_state()
        if rank.rank == 0:
            trajectory.add(Point(outcome.loss, outcome.grad_norm, outcome.reason, outcome.loss_scale), masters)


def train_plainly(rank: Rank) -> str:
    """Trains the oracle and then the noise baseline; returns why the latter cannot run, or nothing.

    Their trajectories go below ``job["folder"]``; the steps of ``job["skipped"]``, from 1 on, are not applied.
    """
    config, device = config_from_dict(rank.job["config"]), rank.torch_device()
    dataset = load_dataset(config.data, config.model.max_seq_len)
    fp32 = PrecisionPolicy.named("fp32")
    _train(rank, config, ORACLE, _plain_training(config, dataset, device, fp32, perturbation=0.0), dataset)
    try:
        eps = torch.finfo(torch.float32).eps
        perturbed = _plain_training(config, dataset, device, make_policy(config), perturbation=eps)
        _train(rank, config, NOISE_BASELINE, perturbed, dataset)
    except Exception as error:  # plain autocast fails on some models that engines train
        traceback.print_exc()
        return failure_reason(error)
    return ""


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


def _train(rank: Rank, config: RunConfig, name: str, training: PlainTraining, dataset: Dataset) -> None:
    schedule = config.schedule.over(config.train.steps)
    trajectory = Trajectory(Path(rank.job["folder"], name))
    trajectory.start(training.weights())
    train = config.train
    # one loader for the micro-batches of all ranks, in the order of their global index
    num_micro_batches = train.global_batch_size // train.micro_batch_size
    loader = BatchLoader(dataset.train, config.seed, train.micro_batch_size, num_micro_batches)
    for step, micro_batches in enumerate(islice(loader, train.steps), start=1):
        lr = config.optim.lr * schedule.factor(training.applied_steps)
        on_device = [to_device(micro_batch, training.device) for micro_batch in micro_batches]
        loss, grad_norm = training.step(on_device, lr, skip=step in rank.job["skipped"])
        trajectory.add(Point(loss, grad_norm), training.weights())


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
        free_memory(device)
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
