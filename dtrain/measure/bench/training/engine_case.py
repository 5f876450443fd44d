"""A case in which one of dtrain's engines trains; peers' processes do not import it, because it holds the engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtrain.config.schema import RunConfig, TelemetryConfig
from dtrain.device import TensorBytes
from dtrain.distributed.startup.setup import connect
from dtrain.engine.interface import Engine
from dtrain.measure.bench.records import LinearFormat, RankJob
from dtrain.measure.bench.training.batches import Batches
from dtrain.measure.bench.training.part_times import PartTimes
from dtrain.measure.bench.training.rank_training import RankTraining
from dtrain.telemetry.precision_files import PrecisionFiles
from dtrain.train.sampling import PrecisionSampling
from dtrain.train.session import MicroBatch, Session, StepWatch
from dtrain.train.setup import make_engine
from dtrain.train.validation import to_device


def prepare(job: RankJob, config: RunConfig, model: nn.Module, batches: Batches, device: torch.device) -> RankTraining:
    """Makes the job's engine around ``model``; the process group that it needs exists."""
    case = job.case
    engine = make_engine(config, model, connect(device))
    session = Session(engine, config, weigh=None if batches.source == "loader" else lambda _: batches.weight)
    sinks = [PrecisionFiles(Path(job.folder), 0)] if case.samples and engine.rank == 0 else []
    sampling = PrecisionSampling(engine, TelemetryConfig(precision_every=int(case.samples)), sinks)

    def step() -> Callable[[], float]:
        return partial(getattr, session.step([next(batches)], sampling.around_step()), "loss")

    def activations() -> int:
        watch = _ActivationBytes(device)
        session.step([to_device(next(batches), device)], watch=watch)
        return watch.nbytes

    def facts() -> dict[str, Any]:
        return {
            "num_parameters": engine.num_parameters,
            "state": {kind: size for kind, size in engine.memory().items() if kind != "unreduced_grad"},
            "formula": engine.memory_formula(),
            "linears": _linears(engine) if case.recipe is not None else [],
            "host_kinds": list(engine.host_kinds),
            "graphs": engine.compiled_graphs,
            "emulates_float8": case.precision == "fp8" and engine.contract.policy.float8.emulate is True,
        }

    parts = _time_vote(engine) if case.times_vote else dict
    return RankTraining(step, facts, parts, activations if case.blocks is not None else None)


def _time_vote(engine: Engine) -> Callable[[], dict[str, float]]:
    """Returns a function that returns the milliseconds of ``engine``'s vote since the last call, and of its parts."""
    times = PartTimes(engine.device)
    times.watch(engine, "_vote", "vote")
    # only within the vote: after a skipped step the ranks also gather records about the culprit
    times.watch(engine, "_squares", "norm", within="vote")
    times.watch(engine.comm, "gather_rows", "all-gather", within="vote")

    def take() -> dict[str, float]:
        ms = times.take()
        return {**ms, "vote": sum(ms.values())}

    return take


def _linears(engine: Engine) -> list[LinearFormat]:
    times = {decision.name: (decision.bf16_ms, decision.float8_ms) for decision in engine.contract.decisions}
    return [
        LinearFormat(
            found.name, linear.out_features, linear.in_features, found.format, found.reason, *times.get(found.name, ())
        )
        for found in engine.contract.modules
        if isinstance(linear := engine.module.get_submodule(found.name), nn.Linear)
    ]


class _ActivationBytes(StepWatch):
    """Counts in ``nbytes`` how many bytes more are allocated on ``device`` after the forward of a step than before.

    Each storage counts once, whoever keeps it: autograd, recomputation or compiled code. Hooks on saved tensors see
    only the first of these.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.nbytes = 0

    @contextmanager
    def forward(self, micro: MicroBatch) -> Iterator[None]:
        with TensorBytes(self._device) as found:
            yield
        self.nbytes = found.kept
