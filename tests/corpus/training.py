"""Trains a model under the engine of a trial and with the FP32 oracle, which imports nothing of dtrain."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import dtrain
from tests.engines.matrix import Trial
from tests.helpers.oracle import AdamWSettings, Oracle, OracleStep, assert_close_to_largest, normwise_error

MicroBatch = Mapping[str, Any]
Built = TypeVar("Built", bound=nn.Module)
Loss = Callable[[Callable[..., Any], MicroBatch], Tensor]
SETTINGS = AdamWSettings(lr=0.01, eps=1e-2)  # of Adam's square root, so that rounding of small gradients stays small
TOLERANCES = {"fp32": 1e-5, "bf16": 3e-2, "fp16": 1e-2, "fp8": 0.2}
"""Allowed shares: in FP32 of the largest element of each master, else of the change of all masters together."""


def seeded(build: Callable[[], Built], seed: int = 0) -> Built:
    """What ``build`` makes, with the same weights at each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


class Multiplied(torch.autograd.Function):
    """Identity whose gradient is multiplied, so that it can overflow while the loss is finite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.factor, None


def loss_of_model(model: Callable[..., Any], micro_batch: MicroBatch) -> Tensor:
    """The loss of a model that returns it."""
    return model(**micro_batch)  # type: ignore[no-any-return]


def start(trial: Trial, model: nn.Module, **options: Any) -> Any:
    """The engine of the trial with AdamW of ``SETTINGS`` and without clipping, unless ``options`` say otherwise."""
    optimizer = dtrain.AdamW(lr=SETTINGS.lr, eps=SETTINGS.eps, betas=SETTINGS.betas, weight_decay=SETTINGS.weight_decay)
    return trial.engine(model, **{"optimizer": optimizer, "max_grad_norm": None, **trial.options, **options})


def step_of(
    engine: Any, micro_batches: Sequence[tuple[MicroBatch, float]], loss: Loss = loss_of_model
) -> dtrain.StepOutcome:
    """One step on this rank's share of all ranks' pairs of a micro-batch and its loss's weight."""
    for micro_batch, weight in engine.accumulate(micro_batches[engine.rank :: engine.world_size]):
        engine.backward(loss(engine, micro_batch), weight=weight)
    return engine.step()  # type: ignore[no-any-return]


def follows_oracle(
    trial: Trial,
    build: Callable[[], nn.Module],
    steps: Sequence[Sequence[tuple[MicroBatch, float]]],
    *,
    loss: Loss = loss_of_model,
    max_grad_norm: float | None = None,
    tolerance: float | None = None,
    **options: Any,
) -> Any:
    """Asserts that outcome, loss and norm of each step and the masters after it are the oracle's; returns the engine.

    Args:
        trial: its case decides engine, stage, precision and ranks.
        build: makes the model, the same at each call.
        steps: of each step, all ranks' pairs of micro-batch and weight; six a step can be shared by 1, 2 and 3 ranks.
        loss: the loss of a micro-batch, by the engine or the model.
        max_grad_norm: clips.
        tolerance: instead of the one of the precision in ``TOLERANCES``.
        options: of ``dtrain.initialize``.
    """
    oracle = Oracle(build(), optimizer=SETTINGS, max_grad_norm=max_grad_norm, loss=loss)
    engine = start(trial, build(), max_grad_norm=max_grad_norm, **options)
    tolerance = TOLERANCES[trial.case.precision] if tolerance is None else tolerance
    for micro_batches in steps:
        before = oracle.masters()
        want, outcome = oracle.step(micro_batches), step_of(engine, micro_batches, loss)
        _compare_outcomes(outcome, want, tolerance)
        if masters := engine.master_state():  # rank 0's; the others have none
            compare_masters(masters, oracle.masters(), before, tolerance, trial.case.precision)
    return engine


def _compare_outcomes(outcome: dtrain.StepOutcome, want: OracleStep, tolerance: float) -> None:
    assert outcome.applied == want.applied, outcome
    if want.applied:
        for name, got, expected in (("loss", outcome.loss, want.loss), ("norm", outcome.grad_norm, want.grad_norm)):
            assert math.isclose(got, expected, rel_tol=tolerance, abs_tol=1e-6), f"{name}: {got}, want {expected}"


def compare_masters(
    masters: Mapping[str, Tensor], want: Mapping[str, Tensor], before: Mapping[str, Tensor], tolerance: float,
    precision: str = "fp32",
) -> None:  # fmt: skip
    """Asserts that the masters are those of the oracle; in low precision, that they have moved as far."""
    if precision == "fp32":
        assert_close_to_largest(masters, {name: want[name] for name in masters}, tolerance)
        return
    moved = {name: masters[name] - before[name] for name in masters}
    error = normwise_error(moved, {name: want[name] - before[name] for name in masters})
    assert error <= tolerance, f"the masters have moved by another {error:.3g} of what they should, allowed {tolerance}"
