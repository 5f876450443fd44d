"""What accelerate's tests state of micro-batches and ranks: what one step of all of them together is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dtrain
from tests.corpus.rows import assertion
from tests.corpus.training import (
    SETTINGS,
    TOLERANCES,
    compare_masters,
    follows_oracle,
    loss_of_model,
    seeded,
    start,
    step_of,
)
from tests.engines.matrix import Trial
from tests.helpers.oracle import Oracle, normwise_error

Pair = tuple[Mapping[str, Tensor], float]
RATE = 0.1


class Regression(nn.Module):
    """Two layers, whose rows two and three ranks share unevenly; returns the mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(torch.tanh(self.first(x))).float(), y)


def regression() -> Regression:
    return seeded(Regression, 3)


def samples(number: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a linear law."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 3, generator=draw)
    return x, (x @ torch.tensor([[2.0, 1, 0, -1, 3], [0, 1, 1, 2, 0], [1, 0, 2, 0, 1]]) + 0.5) / 2


def follow(trial: Trial, engine: Any, oracle: Oracle, pairs: Sequence[Pair], *dummies: Pair) -> None:
    """Asserts that a step on the micro-batches and the dummies is the oracle's on the micro-batches alone."""
    before = oracle.masters()
    want, outcome = oracle.step(pairs), step_of(engine, [*pairs, *dummies])
    assert outcome.applied
    assert math.isclose(outcome.loss, want.loss, rel_tol=1e-5)
    if masters := engine.master_state():  # rank 0's; the others have none
        compare_masters(masters, oracle.masters(), before, TOLERANCES[trial.case.precision], trial.case.precision)


def micro_batches(numbers: Sequence[int], seed: int = 0) -> list[Pair]:
    """Micro-batches with these numbers of samples, each weighted by its number."""
    x, y = samples(sum(numbers), seed)
    parts = zip(x.split(list(numbers)), y.split(list(numbers)), strict=True)
    return [({"x": part, "y": targets}, float(len(part))) for part, targets in parts]


@assertion(
    "huggingface/accelerate src/accelerate/test_utils/scripts/test_sync.py::test_gradient_accumulation",
    "Gradients are complete on all ranks after every second batch, and after the last batch of the data, "
    "which stands alone.",
)
def a_last_step_with_fewer_micro_batches_is_complete_too(trial: Trial) -> None:
    """Two micro-batches a rank in each step, and one in the last."""
    steps = [micro_batches([2] * trial.ranks * own, seed) for seed, own in enumerate((2, 2, 1))]
    follows_oracle(trial, regression, steps)


@assertion(
    "huggingface/accelerate src/accelerate/test_utils/scripts/test_sync.py::test_distributed_sync_multiple_fwd",
    "If all forwards run before the first backward, the gradients after the last backward are those of "
    "training in one process.",
)
def forwards_that_run_before_the_first_backward_have_their_gradients(trial: Trial) -> None:
    pairs = micro_batches([1, 2, 3, 2, 1, 3])
    oracle, engine = Oracle(regression(), optimizer=SETTINGS), start(trial, regression())
    own = pairs[trial.rank :: trial.ranks]
    losses = [loss_of_model(engine, batch) for batch, _ in own]
    for index in engine.accumulate(range(len(own))):
        engine.backward(losses[index], weight=own[index][1])
    assert engine.step().applied
    before = oracle.masters()
    oracle.step(pairs)
    if masters := engine.master_state():
        compare_masters(masters, oracle.masters(), before, TOLERANCES["fp32"])
    follow(trial, engine, oracle, pairs)  # a usual step after it


@assertion(
    "huggingface/accelerate src/accelerate/test_utils/scripts/test_script.py::training_check",
    "Training on all ranks with their shares of each batch gives the weights of training in one process with "
    "the whole batch, in FP32, BF16 and FP16.",
    precisions=("fp32", "bf16", "fp16"),
)
def shares_of_a_batch_train_as_the_whole_batch_in_one_process(trial: Trial) -> None:
    """By SGD, which does not hide the scale of a gradient as Adam does."""
    plain = regression()
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    optimizer, sgd = torch.optim.SGD(plain.parameters(), lr=RATE), dtrain.SGD(lr=RATE, momentum=0.0)
    engine = start(trial, regression(), optimizer=sgd, loss_scale=2.0**8)
    for seed in range(3):
        x, y = samples(6, seed)
        optimizer.zero_grad()
        plain(x, y).backward()
        optimizer.step()
        own = slice(trial.rank * 6 // trial.ranks, (trial.rank + 1) * 6 // trial.ranks)
        engine.backward(engine(x=x[own], y=y[own]))
        assert engine.step().applied
    if masters := engine.master_state():
        moved = {name: masters[name] - before[name] for name in masters}
        want = {name: p.detach() - before[name] for name, p in plain.named_parameters()}
        assert normwise_error(moved, want) < {"fp32": 1e-5, "bf16": 1e-2, "fp16": 2e-3}[trial.case.precision]


@assertion(
    "huggingface/accelerate src/accelerate/test_utils/scripts/test_distributed_data_loop.py::"
    "test_can_join_uneven_inputs",
    "Ranks whose numbers of batches differ train to the end of the data: each sees exactly its own batches.",
)
def a_rank_without_data_takes_part_by_a_dummy_that_counts_for_nothing(trial: Trial) -> None:
    """One batch fewer than the ranks could share: the last rank's second forward is one on any input."""
    pairs = micro_batches([2] * (2 * trial.ranks - 1))
    dummy = ({"x": torch.full((4, 3), 7.0), "y": torch.full((4, 5), -3.0)}, 0.0)
    oracle, engine = Oracle(regression(), optimizer=SETTINGS), start(trial, regression())
    for _ in range(2):
        follow(trial, engine, oracle, pairs, dummy)


class Mixed(nn.Module):
    """A matrix that comes in another dtype than the norm after it, as in many published models."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(3, 7, dtype=dtype), nn.LayerNorm(7), nn.Linear(7, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.inner(x.to(self.inner.weight.dtype)).float()
        return F.mse_loss(self.head(torch.tanh(self.norm(hidden))).float(), y)


def mixed(dtype: torch.dtype) -> Mixed:
    """With weights that BF16 holds exactly."""
    model, draw = Mixed(dtype), torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw).bfloat16())
    return model


@assertion(
    "huggingface/accelerate tests/fsdp/test_fsdp.py::test_fsdp2_uniform_dtype_upcast_bf16",
    "A model that comes with BF16 matrices and FP32 norms has FP32 master weights in BF16 training.",
    precisions=("bf16",),
)
def a_model_that_comes_with_bf16_weights_has_fp32_masters(trial: Trial) -> None:
    """Four updates, each of which is below what BF16 can add to a weight, are kept."""
    oracle = Oracle(mixed(torch.float32), optimizer=replace(SETTINGS, lr=1e-4))
    engine = start(trial, mixed(torch.bfloat16), optimizer=dtrain.AdamW(lr=1e-4, eps=SETTINGS.eps))
    first = oracle.masters()
    for seed in range(4):
        pairs = micro_batches([2, 1, 3, 2, 1, 3], seed)
        oracle.step(pairs)
        assert step_of(engine, pairs).applied
    if masters := engine.master_state():
        assert {master.dtype for master in masters.values()} == {torch.float32}
        compare_masters(masters, oracle.masters(), first, TOLERANCES["bf16"], "bf16")
