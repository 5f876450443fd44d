"""DeepSpeed's tests of gradients and rates, restated with weights whose gradient is their input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain
from tests.corpus.assertions.olmo_steps import each_update_is_at_the_rate_of_warmup_and_cosine
from tests.corpus.faults.deepspeed_gradients import the_last_micro_batch_of_every_rank_is_in_the_gradient
from tests.corpus.faults.torch_states import all_ranks_begin_with_the_weights_and_buffers_of_rank_0
from tests.corpus.rows import assertion
from tests.corpus.training import Multiplied, follows_oracle, seeded, step_of
from tests.engines.matrix import Trial

TESTS = "deepspeedai/DeepSpeed tests/unit"
PLAIN_SGD = dtrain.SGD(lr=1.0, momentum=0.0, weight_decay=0.0)
X = torch.arange(1.0, 6.0)


class Dot(nn.Module):
    """The sum of weight x input: the gradient of the weight is the input, times ``factor``."""

    def __init__(self, initial: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(initial.clone())

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return (Multiplied.apply(self.weight, factor) * x).float().sum()


def dot_engine(trial: Trial, initial: Tensor | None = None, **options: Any) -> Any:
    """``Dot`` from zero under plain gradient descent of rate 1 without clipping, unless ``options`` say otherwise."""
    initial = torch.zeros(5) if initial is None else initial
    return trial.engine(Dot(initial), **{"optimizer": PLAIN_SGD, "max_grad_norm": None, **options})


def step_on(engine: Any, inputs: Sequence[Tensor], factor: float = 1.0) -> dtrain.StepOutcome:
    """One step on this rank's share of the inputs of all ranks, each of weight 1."""
    return step_of(engine, [({"x": x, "factor": factor}, 1.0) for x in inputs])


def expect_weight(engine: Any, want: Tensor, rtol: float = 1e-6) -> None:
    """Asserts the master of ``Dot`` on the rank that has it; all ranks call."""
    if masters := engine.master_state():
        torch.testing.assert_close(masters["weight"], want, rtol=rtol, atol=1e-7)


@assertion(
    f"{TESTS}/v1/zero/test_zero.py::TestGradientAllreduceOp::test",
    "With the mean as reduction, a step of plain descent at rate 1 moves the weights by the average gradient of the "
    "ranks.",
)
def a_step_of_plain_descent_moves_by_the_average_gradient(trial: Trial) -> None:
    engine = dot_engine(trial)
    assert step_on(engine, [(1 + rank) * X for rank in range(trial.ranks)]).applied
    expect_weight(engine, -X * (1 + trial.ranks) / 2)


@assertion(
    f"{TESTS}/v1/half_precision/test_gradient_clipping_default.py::TestGradientClippingEndToEnd::"
    "test_init_without_gradient_clipping_defaults_to_one",
    "By default, gradients are clipped at a norm of 1.",
)
def without_a_setting_gradients_are_clipped_at_norm_one(trial: Trial) -> None:
    x = torch.tensor([3.0, 0, 4, 0, 0])
    for options, want in (({}, x / 5), ({"max_grad_norm": None}, x)):
        engine = trial.engine(Dot(torch.zeros(5)), optimizer=PLAIN_SGD, **options)
        assert step_on(engine, [x] * trial.ranks).grad_norm == pytest.approx(5, rel=1e-6)
        expect_weight(engine, -want, rtol=1e-5)


@assertion(
    f"{TESTS}/v1/zero/test_zero.py::TestZeroAdamOptimizerStepCount::test",
    "The step count of Adam is the number of updates, not that of micro-batches, for every parameter.",
)
def bias_correction_counts_updates_and_not_micro_batches(trial: Trial) -> None:
    """If the gradient is constant, corrected Adam moves each weight by the rate; a wrong count moves it otherwise."""
    engine = dot_engine(trial, optimizer=dtrain.AdamW(lr=0.01, weight_decay=0.0))
    for number in range(1, 4):
        assert step_on(engine, [X] * 6).applied
        assert engine.applied_steps == number
        expect_weight(engine, torch.full((5,), -0.01 * number), rtol=1e-5)


class Odd(nn.Module):
    """Two layers of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](torch.tanh(self.layers[0](x))).float().square().mean()


def odd() -> Odd:
    return seeded(Odd)


@assertion(
    f"{TESTS}/v1/zero/test_zero_user_backward.py::TestUnmanagedGradientAccumulation::"
    "test_unmanaged_varying_backward_count",
    "Steps of two, one and three micro-batches each apply the mean over their own number.",
)
def every_step_divides_by_its_own_number_of_micro_batches(trial: Trial) -> None:
    draw = torch.Generator().manual_seed(2)
    steps = [
        [({"x": torch.randn(4, 5, generator=draw)}, 1.0) for _ in range(count * trial.ranks)] for count in (2, 1, 3)
    ]
    follows_oracle(trial, odd, steps)


assertion(
    f"{TESTS}/v1/zero/test_zero.py::TestBF16OptimizerGradReduction::test_boundary_microbatch_grad_is_reduced",
    "The gradient of the last micro-batch before the step is reduced over the ranks like those before it.",
)(the_last_micro_batch_of_every_rank_is_in_the_gradient)

assertion(
    f"{TESTS}/v1/zero/test_zero.py::TestZero3ParamPartitioningLargeParam::test",
    "Weights that only the first rank has initialized are those of all ranks from the first forward on.",
)(all_ranks_begin_with_the_weights_and_buffers_of_rank_0)

assertion(
    f"{TESTS}/runtime/test_lr_schedulers.py::TestWarmupCosineLR::test_lr",
    "The rate is the peak at the end of the warm-up and falls along a cosine to the minimum at the end.",
)(each_update_is_at_the_rate_of_warmup_and_cosine)
