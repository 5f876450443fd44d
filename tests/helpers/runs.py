"""Short training runs on the zoo: under any engine on any number of ranks, under the oracle, and their comparison."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import dtrain
from dtrain.engine.rng import rng_key
from dtrain.engine.step import StepEngine
from dtrain.parameters.model_states import MAIN_GRAD
from tests.helpers.oracle import AdamWSettings, Oracle, OracleStep, assert_close_to_largest, normwise_error
from tests.helpers.zoo import make

SCHEDULE = dtrain.Cosine(warmup_steps=3, total_steps=40)
# Elementwise tolerance of the main grads and normwise tolerance of the masters after 20 steps. FP32: the order of sums.
# BF16 and FP16: a few epsilon of the format.
TOLERANCES = {"fp32": (1e-6, 5e-5), "bf16": (4e-2, 1.5e-2), "fp16": (5e-3, 5e-3)}


@dataclass(frozen=True)
class Run:
    """A zoo model, its training options and its number of steps."""

    model: str = "mlp"
    steps: int = 20
    accumulation: int = 1  # micro-batches of one rank in a step
    unequal_weights: bool = False
    max_grad_norm: float | None = 0.05  # below the norms of the zoo's gradients: clipping is active
    lr: float = 3e-3
    seed: int = 11
    options: dict[str, Any] = field(default_factory=dict)  # of dtrain.initialize

    def weight(self, step: int, index: int) -> float:
        """Weight of the micro-batch with global ``index``."""
        return 1.0 + (step * 7 + index * 3) % 5 if self.unequal_weights else 1.0

    def with_options(self, **options: Any) -> Run:
        """The same run with more options of ``dtrain.initialize``."""
        return replace(self, options={**self.options, **options})


@dataclass(frozen=True)
class Result:
    """Result of a run: gradients of the first step, outcome of each step, last masters. Tensors on rank 0 only."""

    gradients: dict[str, Tensor]
    outcomes: list[dtrain.StepOutcome]
    masters: dict[str, Tensor]


def start(run: Run, *, weights: int = 0, **options: Any) -> Any:
    """Returns the engine of ``run`` before its first step; ``weights`` seeds the model."""
    torch.set_num_threads(1)
    engine = dtrain.initialize(
        make(run.model).build(weights),
        schedule=SCHEDULE,
        max_grad_norm=run.max_grad_norm,
        seed=run.seed,
        **{"optimizer": dtrain.AdamW(lr=run.lr), **run.options, **options},
    )
    assert isinstance(engine, StepEngine)
    return engine


def forward_backward(engine: StepEngine, run: Run, step: int, *, loss_factor: float = 1.0) -> None:
    """Runs this rank's micro-batches of one step; ``loss_factor`` may be infinite."""
    entry = make(run.model)
    total = run.accumulation * engine.world_size
    indices = [i * engine.world_size + engine.rank for i in range(run.accumulation)]
    for index in engine.accumulate(indices):
        loss = entry.loss(engine, entry.batch(step * total + index))
        engine.backward(loss * loss_factor, weight=run.weight(step, index))


def main_gradients(engine: StepEngine, run: Run, step: int) -> dict[str, Tensor]:
    """The reduced gradient in full, unscaled and divided by the sum of weights; before ``engine.step``."""
    engine.finish_gradients()
    total = run.accumulation * engine.world_size
    divisor = engine.loss_scale.scale * sum(run.weight(step, index) for index in range(total))
    return {name: (gradient / divisor).clone() for name, gradient in engine.states.full_state(MAIN_GRAD)}


def train_engine(engine: StepEngine, run: Run) -> Result:
    """Trains a new engine on this rank."""
    gradients: dict[str, Tensor] = {}
    outcomes = []
    for step in range(run.steps):
        forward_backward(engine, run, step)
        if step == 0:
            gradients = main_gradients(engine, run, step)
        outcomes.append(engine.step())
    return Result(gradients if engine.rank == 0 else {}, outcomes, engine.master_state())


def train(rank: int, world: int, run: Run) -> Result:
    """Runs ``run`` on this rank."""
    return train_engine(start(run), run)


def train_all(rank: int, world: int, runs: list[Run]) -> list[Result]:
    """Runs all of ``runs``, one after the other, on this rank."""
    return [train(rank, world, run) for run in runs]


def oracle_run(run: Run, world: int) -> tuple[Oracle, list[OracleStep]]:
    """The same run through the oracle, which sees the micro-batches of all ranks; computed once per session."""
    values = {name: getattr(run, name) for name in Run.__dataclass_fields__ if name != "options"}
    return _oracle_run(world, **values)


@functools.cache
def _oracle_run(world: int, **values: Any) -> tuple[Oracle, list[OracleStep]]:
    run = Run(**values)
    entry = make(run.model)
    oracle = Oracle(
        entry.build(0),
        optimizer=AdamWSettings(lr=run.lr),
        schedule=SCHEDULE.factor,
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


def assert_follows_the_oracle(results: list[list[Result]], runs: list[Run]) -> None:
    """Compares the results of all runs on all ranks with the oracle on the same micro-batches."""
    world = len(results)
    for number, run in enumerate(runs):
        case = f"{run.model}, {world} ranks, accumulation {run.accumulation}: {run.options}"
        got = results[0][number]
        oracle, steps = oracle_run(run, world)
        grad_tolerance, master_tolerance = TOLERANCES[run.options["precision"]]
        assert all(outcome.applied for outcome in got.outcomes), case
        assert all(step.grad_norm > (run.max_grad_norm or 0) for step in steps), "clipping must be active"
        assert_close_to_largest(got.gradients, steps[0].gradients, grad_tolerance)
        error = normwise_error(got.masters, oracle.masters())
        assert error < master_tolerance, f"{case}: masters off by {error:.3g}"
        assert got.outcomes[0].loss == pytest.approx(steps[0].loss, rel=grad_tolerance), case
        assert got.outcomes[0].grad_norm == pytest.approx(steps[0].grad_norm, rel=grad_tolerance), case
        for rank in range(1, world):
            assert results[rank][number].outcomes == got.outcomes, f"{case}: rank {rank} saw another outcome"


def assert_odd_models_follow(results: list[list[Result]], runs: list[Run]) -> None:
    """The same for models with gradients that are zero up to rounding, such as of a bias before a batch norm."""
    world = len(results)
    for number, run in enumerate(runs):
        case = f"{run.model}, {world} ranks: {run.options}"
        got, is_reduced = results[0][number], run.options["precision"] != "fp32"
        oracle, steps = oracle_run(run, world)
        want = steps[0].gradients
        largest = max(float(grad.abs().max()) for grad in want.values() if grad.numel())
        # Adam turns even rounding noise into steps of the learning rate: such a parameter's path is arbitrary
        real = [n for n, grad in want.items() if not grad.numel() or not 0 < float(grad.abs().max()) < 1e-6 * largest]
        assert all(outcome.applied for outcome in got.outcomes), case
        assert got.gradients.keys() == got.masters.keys() == want.keys(), case
        got_grads, want_grads = ({n: grads[n] for n in real} for grads in (got.gradients, want))
        if not is_reduced:
            assert_close_to_largest(got_grads, want_grads, 2e-6)
        error = normwise_error(got_grads, want_grads)
        assert error < (0.05 if is_reduced else 2e-6), f"{case}: gradients off by {error:.3g}"
        masters = oracle.masters()
        error = normwise_error({n: got.masters[n] for n in real}, {n: masters[n] for n in real})
        assert error < (2e-2 if is_reduced else 1e-4), f"{case}: masters off by {error:.3g}"
