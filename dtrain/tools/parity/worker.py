"""One process of ``dtrain parity``: a rank of an engine, or the plain training that engines are held against."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtrain.config.dump import config_from_dict, from_plain
from dtrain.config.schema import RunConfig
from dtrain.data import BatchLoader, TextDataset, load_dataset
from dtrain.distributed.file_store import join_ranks
from dtrain.distributed.launch_env import LaunchEnv
from dtrain.distributed.logging import configure_logging
from dtrain.distributed.setup import choose_device, connect, disconnect
from dtrain.engine.rng import rng_key
from dtrain.errors import DtrainError
from dtrain.models import build_model
from dtrain.precision.contract import resolve
from dtrain.precision.forward import set_matmul_precision
from dtrain.precision.policy import PrecisionPolicy
from dtrain.tools.parity.oracle import PlainTraining
from dtrain.tools.parity.trajectory import Point, Trajectory
from dtrain.tools.ranks import open_answer, read_order
from dtrain.train.setup import check_patterns, make_engine, make_loader, make_policy, make_schedule, set_threads
from dtrain.train.trainer import to_device

ORACLE, YARDSTICK = "oracle", "yardstick"
_REASON_LENGTH = 500


@dataclass(frozen=True)
class Order:
    """What this process does.

    Attributes:
        folder: where rank 0 writes the engine's trajectory; for plain training, the folder of its two.
        config: of the training run, as plain values.
        engine: whose rank this is; None: plain training, the oracle and then the yardstick.
        rank: this rank.
        ranks: of the engine.
        store: a file where its ranks meet.
        skipped: steps, from 1, that plain training does not apply.
    """

    folder: str
    config: dict[str, Any]
    engine: str | None = None
    rank: int = 0
    ranks: int = 1
    store: str = ""
    skipped: tuple[int, ...] = ()


def main() -> int:
    """Does what the order says; the answer is JSON, or the reason of a failure."""
    order = from_plain(Order, json.loads(read_order()))
    answer = open_answer()
    config = config_from_dict(order.config)
    try:
        if order.engine is None:
            json.dump(_train_plainly(order, config), answer)
        else:
            _train_with_engine(order, config)
    except Exception as error:  # whatever a library raises: the others go on, and the report has to say it
        traceback.print_exc()
        answer.write(_reason(error))
        return 1
    finally:
        answer.close()
    return 0


def _reason(error: Exception) -> str:
    text = str(error) if isinstance(error, DtrainError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:_REASON_LENGTH]


def _train_with_engine(order: Order, config: RunConfig) -> None:
    configure_logging(order.rank)
    device = choose_device(config.launch.device, order.rank)
    if order.ranks > 1:
        LaunchEnv(order.rank, order.ranks, order.rank, order.ranks).export()  # libraries read it
    join_ranks(order.store, order.rank, order.ranks, device, config.launch.timeout_s)
    comm = connect(device, timeout_s=config.launch.timeout_s)
    set_threads(config, comm)
    dataset = load_dataset(config.data, config.model.max_seq_len)
    model = build_model(config.model, dataset.vocab_size, config.seed)
    check_patterns(config, model)
    engine = make_engine(config, model, comm)
    loader = make_loader(config, dataset, engine)
    trajectory = Trajectory(Path(order.folder))
    start = engine.master_state()
    if order.rank == 0:
        trajectory.start(start)
    for _ in range(config.train.steps):
        for micro_batch in engine.accumulate(next(loader)):
            engine.backward(engine(**to_device(micro_batch, device)))
        outcome = engine.step()
        masters = engine.master_state()
        if order.rank == 0:
            trajectory.add(Point(outcome.loss, outcome.grad_norm, outcome.reason, outcome.loss_scale), masters)
    comm.release()
    disconnect()


def _train_plainly(order: Order, config: RunConfig) -> dict[str, str]:
    """Writes the oracle and the yardstick; returns why there is no yardstick, under its name, where there is none."""
    torch.set_num_threads(config.launch.threads_per_rank or 1)
    device = choose_device(config.launch.device, 0)
    dataset = load_dataset(config.data, config.model.max_seq_len)
    policy = make_policy(config)
    exact = PrecisionPolicy.named("fp32")
    _write(order, config, ORACLE, _plain_training(config, dataset, device, exact, shake=0.0), dataset)
    try:
        shaken = _plain_training(config, dataset, device, policy, shake=torch.finfo(torch.float32).eps)
        _write(order, config, YARDSTICK, shaken, dataset)
    except Exception as error:  # plain autocast fails on some models that engines train
        traceback.print_exc()
        return {YARDSTICK: _reason(error)}
    return {}


def _plain_training(
    config: RunConfig, dataset: TextDataset, device: torch.device, policy: PrecisionPolicy, *, shake: float
) -> PlainTraining:
    set_matmul_precision(policy)
    model = build_model(config.model, dataset.vocab_size, config.seed).float().to(device)
    return PlainTraining(
        model,
        config.optim,
        lambda step, index: torch.manual_seed(rng_key(config.seed, step, index)),
        compute_dtype=policy.compute_dtype if policy.is_reduced_precision else None,
        shake=shake,
        float8_linears=resolve(policy, model).float8_modules,
    )


def _write(order: Order, config: RunConfig, name: str, training: PlainTraining, dataset: TextDataset) -> None:
    schedule = make_schedule(config.schedule, config.train.steps)
    trajectory = Trajectory(Path(order.folder, name))
    trajectory.start(training.weights())
    for step, micro_batches in enumerate(_global_batches(config, dataset), start=1):
        lr = config.optim.lr * schedule.factor(training.applied_steps)
        on_device = [to_device(micro_batch, training.device) for micro_batch in micro_batches]
        loss, grad_norm = training.step(on_device, lr, skip=step in order.skipped)
        trajectory.add(Point(loss, grad_norm), training.weights())


def _global_batches(config: RunConfig, dataset: TextDataset) -> Iterator[list[dict[str, Tensor]]]:
    """The micro-batches of all ranks, step by step, in the order of their global index."""
    train = config.train
    num_micro_batches = train.global_batch_size // train.micro_batch_size
    loader = BatchLoader(dataset.train, config.seed, train.micro_batch_size, num_micro_batches)
    for _ in range(train.steps):
        yield next(loader)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the answer is out: a thread of a library that ends at the wrong moment must not abort this rank
