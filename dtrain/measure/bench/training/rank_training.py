"""The training that a rank of a benchmark case prepares, by dtrain or by another library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from dtrain.config.dump import from_plain
from dtrain.config.engines import EngineConfig
from dtrain.config.model import ModelConfig
from dtrain.config.optim import OptimConfig
from dtrain.config.precision import Float8, LossScale, PrecisionConfig
from dtrain.config.schedule import Constant
from dtrain.config.schema import GROUP_OPTIONS, RunConfig, TrainConfig
from dtrain.measure.bench.records import RankJob


@dataclass(frozen=True)
class RankTraining:
    """A case that is ready to train in this process.

    Attributes:
        step: trains on the next batch; returns a function that reads the loss.
        facts: fields of ``Footprint`` that only the one that trains knows.
        parts: returns the milliseconds of parts of the steps since its last call, by name.
        activations: takes one more step; None: they are not measured.
    """

    step: Callable[[], Callable[[], float]]
    facts: Callable[[], dict[str, Any]]
    parts: Callable[[], dict[str, float]] = dict
    activations: Callable[[], int] | None = None


def run_config(job: RankJob) -> RunConfig:
    """Returns the configuration of `dtrain train` that trains as the case does."""
    values, case = job.config, job.case
    precision = PrecisionConfig(name=case.precision, loss_scale=LossScale(mode=case.loss_scale))
    if case.recipe is not None:
        float8 = replace(from_plain(Float8, values["float8"]), recipe=case.recipe)
        precision = replace(precision, float8=float8)
    model = from_plain(ModelConfig, values["model"])
    if case.blocks is not None:
        model = replace(model, **asdict(case.blocks))
    if case.loss_chunk is not None:
        model = replace(model, loss_chunk=case.loss_chunk)
    engine = EngineConfig()
    if case.is_dtrain:
        options: dict[str, Any] = {name: True for name in ("reproducible", "graph") if getattr(case, name)}
        if case.offload != "none":
            options["offload"] = case.offload
        engine = GROUP_OPTIONS["engine"][case.engine](zero_stage=case.zero_stage, **options)
    return RunConfig(
        seed=values["seed"],
        train=TrainConfig(micro_batch_size=job.micro_batch, global_batch_size=job.micro_batch * case.ranks),
        engine=engine,
        precision=precision,
        model=model,
        data=from_plain(GROUP_OPTIONS["data"][values["data"]["name"]], values["data"]),
        optim=from_plain(OptimConfig, values["optim"]),
        schedule=Constant(warmup_steps=0),
    )
