"""Gradients that DeepSpeed has lost, left over, scaled twice or clipped by a wrong norm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.errors import DtrainError
from tests.corpus.rows import fault
from tests.corpus.training import SETTINGS, compare_masters, follows_oracle, loss_of_model, seeded, start
from tests.engines.matrix import Trial
from tests.helpers.oracle import Oracle

Batch = list[tuple[dict[str, Tensor], float]]


class Net(nn.Module):
    """Two layers of odd sizes; ``factor`` multiplies the loss and so the gradient of one micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return self.head(torch.tanh(self.first(x))).float().square().mean() * factor


class Experts(nn.Module):
    """Two layers of which a sample reaches only the one that its gate names."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 5), nn.Linear(3, 5)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = gate[:, :1] * self.one(x) + gate[:, 1:] * self.other(x)
        return y.float().square().mean()


def build(kind: type[nn.Module] = Net) -> nn.Module:
    return seeded(kind)


def batches(factors: list[float], seed: int = 1) -> list[Batch]:
    """Returns six micro-batches a step, whose losses are multiplied by the factor of the step."""
    draw = torch.Generator().manual_seed(seed)
    return [[({"x": torch.randn(2, 3, generator=draw), "factor": factor}, 1.0) for _ in range(6)] for factor in factors]


@fault(
    "deepspeedai/DeepSpeed#7985",
    "In BF16 with FP32 accumulation under ZeRO-1, the last micro-batch of a step is not averaged over the ranks.",
    peers="DeepSpeed 0.18.6 to 0.18.10",
    precisions=("bf16", "fp32"),
)
def the_last_micro_batch_of_every_rank_is_in_the_gradient(trial: Trial) -> None:
    """The last micro-batch of each rank has most of the gradient, of another sign on each."""
    draw = torch.Generator().manual_seed(2)
    steps = []
    for _ in range(2):
        batch: Batch = [({"x": torch.randn(2, 3, generator=draw)}, 1.0) for _ in range(6)]
        for index in range(6 - trial.ranks, 6):
            batch[index] = ({"x": 3.0 * torch.randn(2, 3, generator=draw), "factor": (-1.0) ** index * 4.0}, 1.0)
        steps.append(batch)
    follows_oracle(trial, build, steps)


@fault(
    "allenai/open-instruct#1498",
    "If a loop accumulates by itself over several backwards, ZeRO-2 keeps only the gradient of the last one.",
    peers="DeepSpeed ZeRO-2, in open-instruct",
)
def micro_batches_of_a_loop_by_hand_all_count_in_any_number(trial: Trial) -> None:
    """Six, three and six micro-batches a rank and step are announced; a second backward that is not is an error."""
    oracle, engine = Oracle(build(), optimizer=SETTINGS), start(trial, build())
    for number in (6, 3, 6):
        batch = [pair for part in batches([1.0] * trial.ranks, seed=number) for pair in part][: number * trial.ranks]
        before = oracle.masters()
        assert oracle.step(batch).applied
        own = batch[engine.rank :: engine.world_size]
        for index, (micro_batch, weight) in enumerate(own):
            with engine.micro_batch(last=index == len(own) - 1):
                engine.backward(loss_of_model(engine, micro_batch), weight=weight)
        assert engine.step().weight == number * trial.ranks
        if masters := engine.master_state():
            compare_masters(masters, oracle.masters(), before, 1e-5)
    engine.backward(loss_of_model(engine, own[0][0]))
    with pytest.raises(DtrainError, match=r"micro-batch"):
        engine.backward(loss_of_model(engine, own[0][0]))


@fault(
    "deepspeedai/DeepSpeed#7839",
    "In BF16 at stage 0, gradients are not zeroed after a step, and are unscaled though the loss was not scaled.",
    peers="DeepSpeed",
    precisions=("bf16", "fp32"),
)
def nothing_of_a_step_is_left_in_the_gradient_of_the_next(trial: Trial) -> None:
    """The gradients shrink from step to step, so that those of a step would drown the next ones."""
    tolerance = 1e-5 if trial.case.precision == "fp32" else 6e-2  # twice as many elements change their sign as usual
    follows_oracle(trial, build, batches([4.0, 1.0, 0.25]), tolerance=tolerance)


@fault(
    "deepspeedai/DeepSpeed#2686",
    "When the dynamic loss scale grows after a step without overflow, ZeRO unscales the norm of this step by the new "
    "scale.",
    peers="DeepSpeed",
    precisions=("fp16",),
)
def a_step_is_unscaled_by_the_scale_of_its_own_backward(trial: Trial) -> None:
    """The scale doubles after every step, and the norm decides how much is clipped. DeepSpeed has no FP16 on CPUs."""
    scale = dtrain.LossScale("dynamic", init=4.0, growth_interval=1)
    engine = follows_oracle(trial, build, batches([1.0] * 4), max_grad_norm=0.1, loss_scale=scale)
    assert engine.loss_scale.scale == 4.0 * 2**4


@fault(
    "deepspeedai/DeepSpeed#7981",
    "With the optimizer offloaded to the host, ZeRO-1 and 2 keep only the last of several backwards of a step.",
    peers="DeepSpeed",
    engines=("native", "deepspeed"),
    stages=(1, 2, 3),
    variants={"host": {"offload": "cpu"}},
)
def offloaded_states_receive_the_gradients_of_all_micro_batches(trial: Trial) -> None:
    """Only these engines have states on the host."""
    follows_oracle(trial, build, batches([1.0, 5.0, 1.0]), max_grad_norm=1.0)


@fault(
    "deepspeedai/DeepSpeed#5150",
    "The function that clips gradients in FP32 without ZeRO does not apply the factor correctly.",
    peers="DeepSpeed",
    precisions=("fp32", "bf16"),
)
def large_gradients_are_clipped_and_small_ones_are_left(trial: Trial) -> None:
    follows_oracle(trial, build, batches([1.0, 1e-3, 50.0]), max_grad_norm=0.1)


@fault(
    "deepspeedai/DeepSpeed#8475",
    "In FP32 clipping, the norms of ranks that use different experts are averaged, not combined.",
    peers="DeepSpeed AutoEP",
)
def the_norm_is_that_of_the_whole_gradient_wherever_it_arises(trial: Trial) -> None:
    """Each rank's samples reach one of two layers only, and the norm that clips is of both."""
    draw = torch.Generator().manual_seed(3)
    gates = torch.eye(2)
    batch: Batch = [
        ({"x": torch.randn(2, 3, generator=draw), "gate": gates[index % trial.ranks % 2].repeat(2, 1)}, 1.0)
        for index in range(6)
    ]
    follows_oracle(trial, lambda: build(Experts), [batch, batch], max_grad_norm=0.1)
