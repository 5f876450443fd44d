"""From a config to the objects of a run."""

from __future__ import annotations

import os

import torch
from torch import nn

from dtrain.config.dump import config_hash
from dtrain.config.schema import (
    CosineConfig,
    LinearConfig,
    NativeEngineConfig,
    RunConfig,
    ScheduleConfig,
    WSDConfig,
)
from dtrain.data import BatchLoader, TextDataset
from dtrain.distributed.collectives import Communicator
from dtrain.distributed.setup import LaunchEnv
from dtrain.engine.base import Engine
from dtrain.engine.initialize import initialize
from dtrain.errors import ConfigError
from dtrain.optim.adamw import AdamW
from dtrain.optim.schedule import WSD, Constant, Cosine, Linear, Schedule
from dtrain.precision.loss_scale import LossScale
from dtrain.precision.policy import PrecisionPolicy


def set_threads(config: RunConfig, comm: Communicator) -> int:
    """Sets the number of threads of this rank, the same on all ranks, and returns it.

    It is ``launch.threads_per_rank``, else the cores of the host shared by its ranks; one where a reproducible run
    computes on CPU, because sums inside kernels depend on it. Launchers do not agree: torchrun sets one, plain python
    none.
    """
    reproducible = isinstance(config.engine, NativeEngineConfig) and config.engine.reproducible
    if config.launch.threads_per_rank is not None:
        threads = config.launch.threads_per_rank
    elif reproducible and comm.device.type == "cpu":
        threads = 1
    else:
        threads = max(1, _num_cores() // LaunchEnv.read().local_world_size)
    # hosts may differ in cores
    row = torch.tensor([threads], dtype=torch.int64, device=comm.device)
    threads = int(comm.gather_rows(row, label="threads").min())
    torch.set_num_threads(threads)
    return threads


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # what a scheduler gave us; macOS has no such call
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def make_engine(config: RunConfig, model: nn.Module, comm: Communicator) -> Engine:
    """The engine that ``config`` names, around ``model``."""
    optim, scale = config.optim, config.precision.loss_scale
    if not isinstance(config.engine, NativeEngineConfig):
        raise ConfigError(f"engine={config.engine.name} is unknown; valid: native")
    return initialize(
        model,
        optimizer=AdamW(lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay),
        schedule=make_schedule(config.schedule, config.train.steps),
        engine=config.engine.name,
        zero_stage=config.engine.zero_stage,
        precision=PrecisionPolicy.named(config.precision.name, fp32_modules=config.precision.fp32_modules),
        loss_scale=LossScale(
            mode=scale.mode,
            init=scale.init,
            growth_factor=scale.growth_factor,
            backoff_factor=scale.backoff_factor,
            growth_interval=scale.growth_interval,
            hysteresis=scale.hysteresis,
            min=scale.min,
            max=scale.max,
        ),
        max_grad_norm=optim.max_grad_norm,
        grad_reduction=config.engine.grad_reduction,
        reproducible=config.engine.reproducible,
        max_consecutive_skips=config.engine.max_consecutive_skips,
        seed=config.seed,
        comm=comm,
    )


def make_schedule(config: ScheduleConfig, total_steps: int) -> Schedule:
    """The schedule that ``config`` names, over ``total_steps`` applied steps."""
    match config:
        case CosineConfig():
            return Cosine(config.warmup_steps, total_steps, config.min_ratio)
        case LinearConfig():
            return Linear(config.warmup_steps, total_steps, config.min_ratio)
        case WSDConfig():
            return WSD(config.warmup_steps, total_steps, config.decay_steps, config.min_ratio)
        case _:
            return Constant(config.warmup_steps)


def make_loader(config: RunConfig, dataset: TextDataset, engine: Engine) -> BatchLoader:
    """This rank's micro-batches from the engine's data cursor on."""
    train = config.train
    return BatchLoader(
        dataset.train,
        seed=config.seed,
        micro_batch_size=train.micro_batch_size,
        num_micro_batches=train.global_batch_size // (train.micro_batch_size * engine.world_size),
        rank=engine.rank,
        world_size=engine.world_size,
        cursor=engine.data_cursor,
    )


def check_same(comm: Communicator, config: RunConfig, dataset: TextDataset) -> None:
    """Checks that all ranks were started with the same config and see the same data.

    Raises:
        ConfigError: on every rank, naming the first rank that differs from rank 0.
    """
    answers = [answer.split(" ") for answer in comm.exchange_text(f"{config_hash(config)} {dataset.fingerprint}")]
    for index, what in enumerate(("config", "data")):
        for rank, answer in enumerate(answers):
            if answer[index] != answers[0][index]:
                raise ConfigError(
                    f"the {what} of rank {rank} is not that of rank 0 (sha256 {answer[index][:12]} against "
                    f"{answers[0][index][:12]}); start every rank with the same command and the same files"
                )
