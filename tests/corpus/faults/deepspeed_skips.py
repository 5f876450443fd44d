"""Steps whose gradients are not finite: what DeepSpeed has applied, or skipped without a word."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import dtrain
from tests.corpus.rows import fault
from tests.corpus.training import SETTINGS, Multiplied, compare_masters, follows_oracle, seeded, start, step_of
from tests.engines.matrix import Trial
from tests.helpers.oracle import Oracle


class Net(nn.Module):
    """Two layers; ``factor`` multiplies the gradient of the first, and never the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 7), nn.Linear(7, 1)

    def forward(self, x: Tensor, factor: float) -> Tensor:
        return self.head(torch.tanh(Multiplied.apply(self.first(x), factor))).float().square().mean()


def build() -> Net:
    return seeded(Net)


def batches(bad: dict[int, float], num_steps: int) -> list[list[tuple[dict[str, Any], float]]]:
    """Six micro-batches a step, of which the fourth has another factor in the steps of ``bad``."""
    draw = torch.Generator().manual_seed(1)
    return [
        [
            ({"x": torch.randn(2, 3, generator=draw), "factor": bad.get(s, 1.0) if i == 3 else 1.0}, 1.0)
            for i in range(6)
        ]
        for s in range(num_steps)
    ]


@fault(
    "deepspeedai/DeepSpeed#8035",
    "In BF16, ZeRO-2 by default does not look for an Inf in the gradients, so an Inf makes moments and masters NaN.",
    peers="DeepSpeed 0.16.9 to 0.17.1",
    precisions=("bf16", "fp32"),
)
def an_infinite_gradient_of_one_rank_reaches_no_moment(trial: Trial) -> None:
    """The steps around it leave the bits that they leave without it, which are near those of the oracle."""
    steps = batches({1: math.inf}, 3)
    clean, engine = follows_oracle(trial, build, [steps[0], steps[2]]), start(trial, build())
    assert [step_of(engine, batch).applied for batch in steps] == [True, False, True]
    assert engine.applied_steps == 2
    masters, want = engine.master_state(), clean.master_state()
    assert all(torch.equal(masters[name], value) for name, value in want.items())


@fault(
    "deepspeedai/DeepSpeed#8415",
    "If a gradient of BF16 is not finite, the step is silently skipped, while the learning-rate schedule advances.",
    peers="DeepSpeed 0.19.2",
    precisions=("bf16", "fp32"),
)
def a_skipped_step_is_reported_and_leaves_the_schedule_where_it_was(trial: Trial) -> None:
    """The outcome names the gradient and its rank, and the next step has the rate that the skipped one had."""
    oracle = Oracle(build(), optimizer=SETTINGS, schedule=lambda applied: 0.5**applied, loss=lambda m, b: m(**b))
    engine = start(trial, build(), schedule=dtrain.Schedule(lambda applied: 0.5**applied))
    rates = []
    for number, batch in enumerate(batches({1: math.nan, 2: math.inf}, 4)):
        before, want = oracle.masters(), oracle.step(batch)
        outcome = step_of(engine, batch)
        assert (outcome.applied, outcome.reason) == (want.applied, want.reason), outcome
        if number in (1, 2):
            assert outcome.culprit is not None
            assert (outcome.culprit.rank, outcome.culprit.micro_batch) == (3 % trial.ranks, 3 // trial.ranks)
            assert outcome.culprit.tensor.startswith("first.")
        rates.append(outcome.lr)
        masters = engine.master_state()
        if masters and trial.case.precision == "fp32":
            compare_masters(masters, oracle.masters(), before, 1e-5)
    assert rates[0] == 0.01, rates
    assert rates[-1] == 0.005, rates
