"""Runs of the zoo under any engine, and what they must agree on with the oracle."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import dtrain
from dtrain.engine.step import MAIN_GRAD, StepEngine
from tests.helpers.oracle import Oracle, OracleStep, assert_close_to_largest, normwise_error
from tests.helpers.runs import Result, Run, forward_backward, oracle_run
from tests.helpers.zoo import make

# (elementwise tolerance of the main grads, normwise of the masters after 20 steps): those of the native engine
TOLERANCES = {"fp32": (1e-6, 5e-5), "bf16": (4e-2, 1.5e-2), "fp16": (5e-3, 5e-3)}


def start(run: Run, **options: Any) -> StepEngine:
    """The engine of a run, before its first step."""
    torch.set_num_threads(1)
    engine = dtrain.initialize(
        make(run.model).build(0),
        optimizer=dtrain.AdamW(lr=run.lr),
        schedule=dtrain.Cosine(warmup_steps=3, total_steps=40),
        max_grad_norm=run.max_grad_norm,
        seed=run.seed,
        **{**run.options, **options},
    )
    assert isinstance(engine, StepEngine)
    return engine


def main_grads(engine: StepEngine, run: Run, step: int) -> dict[str, Tensor]:
    """The reduced gradient in full, unscaled and divided by the sum of weights; before ``engine.step``."""
    engine.finish_gradients()
    total = run.accumulation * engine.world_size
    divisor = engine.loss_scale.scale * sum(run.weight(step, index) for index in range(total))
    return {name: grad / divisor for name, grad in engine.full_state(MAIN_GRAD)}


def train(run: Run, **options: Any) -> Result:
    """Runs it on this rank."""
    engine = start(run, **options)
    gradients: dict[str, Tensor] = {}
    outcomes = []
    for step in range(run.steps):
        forward_backward(engine, run, step)  # type: ignore[arg-type]
        if step == 0:
            gradients = main_grads(engine, run, step)
        outcomes.append(engine.step())
    return Result(gradients if engine.rank == 0 else {}, outcomes, engine.master_state())


def train_all(rank: int, world: int, runs: list[Run]) -> list[Result]:
    """All runs one after the other on this rank."""
    return [train(run) for run in runs]


@functools.cache
def _oracle(model: str, steps: int, accumulation: int, unequal: bool, world: int) -> tuple[Oracle, list[OracleStep]]:
    return oracle_run(Run(model, steps=steps, accumulation=accumulation, unequal_weights=unequal), world)


def assert_follows_the_oracle(results: list[list[Result]], runs: list[Run]) -> None:
    """All runs, of every rank, against the oracle on the same micro-batches."""
    world = len(results)
    for number, run in enumerate(runs):
        where = f"{run.model}, {world} ranks: {run.options}"
        got = results[0][number]
        oracle, steps = _oracle(run.model, run.steps, run.accumulation, run.unequal_weights, world)
        grad_tolerance, master_tolerance = TOLERANCES[run.options["precision"]]
        assert all(outcome.applied for outcome in got.outcomes), where
        assert steps[0].grad_norm > (run.max_grad_norm or 0), "clipping must be active"
        assert_close_to_largest(got.gradients, steps[0].gradients, grad_tolerance)
        error = normwise_error(got.masters, oracle.masters())
        assert error < master_tolerance, f"{where}: masters off by {error:.3g}"
        assert got.outcomes[0].loss == pytest.approx(steps[0].loss, rel=grad_tolerance), where
        assert got.outcomes[0].grad_norm == pytest.approx(steps[0].grad_norm, rel=grad_tolerance), where
        for rank in range(1, world):
            assert results[rank][number].outcomes == got.outcomes, f"{where}: rank {rank} saw another outcome"


def assert_odd_models_follow(results: list[list[Result]], runs: list[Run]) -> None:
    """The same with models some of whose gradients are zero but for rounding."""
    world = len(results)
    for number, run in enumerate(runs):
        where = f"{run.model}, {world} ranks: {run.options}"
        got, low = results[0][number], run.options["precision"] != "fp32"
        oracle, steps = _oracle(run.model, run.steps, run.accumulation, run.unequal_weights, world)
        want = steps[0].gradients
        largest = max(float(grad.abs().max()) for grad in want.values() if grad.numel())
        # Adam turns even rounding noise into steps of the learning rate: such a parameter's path is arbitrary
        real = [n for n, grad in want.items() if not grad.numel() or not 0 < float(grad.abs().max()) < 1e-6 * largest]
        assert all(outcome.applied for outcome in got.outcomes), where
        assert got.gradients.keys() == got.masters.keys() == want.keys(), where
        got_grads, want_grads = ({n: grads[n] for n in real} for grads in (got.gradients, want))
        if not low:
            assert_close_to_largest(got_grads, want_grads, 2e-6)
        error = normwise_error(got_grads, want_grads)
        assert error < (0.05 if low else 2e-6), f"{where}: gradients off by {error:.3g}"
        masters = oracle.masters()
        error = normwise_error({n: got.masters[n] for n in real}, {n: masters[n] for n in real})
        assert error < (2e-2 if low else 1e-4), f"{where}: masters off by {error:.3g}"
