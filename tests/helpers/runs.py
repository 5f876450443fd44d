"""Short training runs on the zoo, the same micro-batches for the engine on any number of ranks and for the oracle."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import dtrain
from dtrain.engine.native import NativeEngine
from dtrain.engine.rng import rng_key
from tests.helpers.oracle import AdamWSettings, Oracle, OracleStep
from tests.helpers.zoo import make


@dataclass(frozen=True)
class Run:
    """One run: a zoo model, how it is trained, and for how many steps."""

    model: str = "mlp"
    steps: int = 20
    accumulation: int = 1  # micro-batches of one rank in a step
    unequal_weights: bool = False
    max_grad_norm: float | None = 0.05  # below the norms of the zoo's gradients: clipping is active
    lr: float = 3e-3
    seed: int = 11
    options: dict[str, Any] = field(default_factory=dict)  # of dtrain.initialize

    def weight(self, step: int, index: int) -> float:
        """The weight of the micro-batch with global ``index``."""
        return 1.0 + (step * 7 + index * 3) % 5 if self.unequal_weights else 1.0

    def with_options(self, **options: Any) -> Run:
        """The same run with more options of ``dtrain.initialize``."""
        return replace(self, options={**self.options, **options})


@dataclass(frozen=True)
class Result:
    """What a run leaves: the first step's gradients, each step's outcome, the last masters. Tensors on rank 0 only."""

    gradients: dict[str, Tensor]
    outcomes: list[dtrain.StepOutcome]
    masters: dict[str, Tensor]


def start(run: Run) -> NativeEngine:
    """The engine of a run, before its first step."""
    torch.set_num_threads(1)
    engine = dtrain.initialize(
        make(run.model).build(0),
        optimizer=dtrain.AdamW(lr=run.lr),
        schedule=dtrain.Cosine(warmup_steps=3, total_steps=40),
        max_grad_norm=run.max_grad_norm,
        seed=run.seed,
        **run.options,
    )
    assert isinstance(engine, NativeEngine)
    return engine


def forward_backward(engine: NativeEngine, run: Run, step: int, *, loss_factor: float = 1.0) -> None:
    """All micro-batches of one step on this rank; ``loss_factor`` is there to be infinite."""
    entry = make(run.model)
    total = run.accumulation * engine.world_size
    indices = [i * engine.world_size + engine.rank for i in range(run.accumulation)]
    for index in engine.accumulate(indices):
        loss = entry.loss(engine, entry.batch(step * total + index))
        engine.backward(loss * loss_factor, weight=run.weight(step, index))


def main_gradients(engine: NativeEngine, run: Run, step: int) -> dict[str, Tensor]:
    """The reduced gradient in full, unscaled and divided by the sum of weights; before ``engine.step``."""
    engine.finish_gradients()
    total = run.accumulation * engine.world_size
    divisor = engine.loss_scale.scale * sum(run.weight(step, index) for index in range(total))
    return {spec.name: (g / divisor).clone() for spec, g in engine.state.full_main_grads()}


def train(rank: int, world: int, run: Run) -> Result:
    """Runs it on this rank."""
    engine = start(run)
    gradients: dict[str, Tensor] = {}
    outcomes = []
    for step in range(run.steps):
        forward_backward(engine, run, step)
        if step == 0:
            gradients = main_gradients(engine, run, step)
        outcomes.append(engine.step())
    masters = engine.master_state()
    return Result(gradients if rank == 0 else {}, outcomes, masters)


def oracle_run(run: Run, world: int) -> tuple[Oracle, list[OracleStep]]:
    """The same run through the oracle, which sees the micro-batches of all ranks."""
    entry = make(run.model)
    schedule = dtrain.Cosine(warmup_steps=3, total_steps=40)
    oracle = Oracle(
        entry.build(0),
        optimizer=AdamWSettings(lr=run.lr),
        schedule=schedule.factor,
        max_grad_norm=run.max_grad_norm,
        loss=lambda model, micro: entry.loss(model, micro),
        before_forward=lambda step, index: torch.manual_seed(rng_key(run.seed, step, index)),
    )
    total = run.accumulation * world
    steps = []
    for step in range(run.steps):
        micro_batches = [(entry.batch(step * total + i), run.weight(step, i)) for i in range(total)]
        steps.append(oracle.step(micro_batches))
    return oracle, steps
