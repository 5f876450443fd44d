"""Assertions of PyTorch's tests of fully_shard."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dtrain
from tests.corpus.assertions.accelerate_micro_batches import (
    forwards_that_run_before_the_first_backward_have_their_gradients,
)
from tests.corpus.assertions.deepspeed_gradients import PLAIN_SGD, dot_engine, expect_weight, odd, step_on
from tests.corpus.assertions.megatron_steps import bf16_gradients_are_summed_in_fp32
from tests.corpus.faults.torch_gradients import all_rows_of_a_tied_weight_are_updated_on_uneven_ranks
from tests.corpus.rows import assertion
from tests.corpus.training import SETTINGS, MicroBatch, follows_oracle, seeded, start
from tests.engines.checks.skips import skips_a_bad_number_on_all_ranks_and_nothing_of_it_is_left
from tests.engines.matrix import Trial
from tests.helpers.oracle import Oracle

TESTS = "pytorch/pytorch test/distributed/_composable/fsdp/test_fully_shard"

assertion(
    f"{TESTS}_grad_scaler.py::TestFullyShardGradientScaler::test_gradient_scaler",
    "Inf in one rank's shard of a gradient is found on all ranks; the step changes no state and the scale backs off.",
)(skips_a_bad_number_on_all_ranks_and_nothing_of_it_is_left)


def inputs(num_steps: int, *shape: int) -> list[list[tuple[dict[str, Any], float]]]:
    """Six micro-batches a step, of weight 1."""
    draw = torch.Generator().manual_seed(5)
    return [[({"x": torch.randn(*shape, generator=draw)}, 1.0) for _ in range(6)] for _ in range(num_steps)]


class TwoOutputs(nn.Module):
    """Two layers, each with an output of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.first(x)), torch.tanh(self.second(self.first.in_features * x))


def of_used_outputs(model: Callable[..., Any], micro_batch: MicroBatch) -> Tensor:
    first, second = model(micro_batch["x"])
    return (first * second if micro_batch["uses_both"] else first).float().square().mean()


@assertion(
    f"{TESTS}_autograd.py::TestFullyShardAutograd::test_unused_forward_output",
    "Gradients are those of one process if some steps do not use one of the outputs of the forward.",
)
def an_output_that_the_loss_ignores_leaves_the_other_gradients_right(trial: Trial) -> None:
    steps = inputs(4, 3, 5)
    for number, step in enumerate(steps):
        for micro_batch, _ in step:
            micro_batch["uses_both"] = number % 3 == 0
    follows_oracle(trial, partial(seeded, TwoOutputs), steps, loss=of_used_outputs)


class Looped(nn.Module):
    """A trained and a frozen layer, each passed through three times, between them without gradients too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.trained = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.frozen(F.relu(self.trained(x)))
            with torch.no_grad():
                x += F.relu(self.trained(x))
        return x.float().square().mean()


@assertion(
    f"{TESTS}_frozen.py::TestFullyShardFrozen::test_multi_forward_mixed_requires_grad",
    "Trained and frozen layers that take part several times, with and without gradients, train as in one process.",
)
def layers_that_run_with_and_without_gradients_in_a_forward_train(trial: Trial) -> None:
    follows_oracle(trial, partial(seeded, Looped), inputs(3, 4, 5))


class OnlyBiases(nn.Module):
    """Layers whose biases are trained; each is recomputed in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(5, 3)])
        for layer in self.layers:
            layer.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False))
        return x.float().square().mean()


@assertion(
    f"{TESTS}_frozen.py::TestFullyShardFrozen::test_train_mixed_requires_grad_per_group",
    "Trained biases beside frozen weights in the same unit train as under data parallelism, also with recomputation.",
)
def biases_train_beside_frozen_weights_of_the_same_unit(trial: Trial) -> None:
    engine = follows_oracle(trial, partial(seeded, OnlyBiases), inputs(3, 4, 5))
    assert {name.rpartition(".")[2] for name in engine.master_state()} <= {"bias"}


@assertion(
    f"{TESTS}_mixed_precision.py::TestFullyShardMixedPrecisionTraining::test_reduce_dtype_after_frozen_first_forward",
    "A first forward while everything is frozen does not change the FP32 in which later gradients are reduced.",
    precisions=("bf16",),
)
def a_first_forward_of_frozen_weights_changes_no_later_reduction(trial: Trial) -> None:
    engine = dot_engine(trial, optimizer=dtrain.SGD(lr=6.0, momentum=0.0, weight_decay=0.0))
    parameters = list(engine.module.parameters())
    for parameter in parameters:
        parameter.requires_grad_(False)
    with torch.no_grad():
        engine(torch.ones(5))
    for parameter in parameters:
        parameter.requires_grad_(True)
    assert step_on(engine, [torch.full((5,), 512.0), *[torch.ones(5)] * 5]).applied
    expect_weight(engine, torch.full((5,), -517.0), rtol=1e-6)


@assertion(
    f"{TESTS}_clip_grad_norm_.py::TestClipGradNormWorldSize2::test_clip_grad_norm_1d",
    "The norm over shards is that of the whole gradients, and clipping by it changes them as in one process.",
)
def clipping_over_uneven_shards_is_that_of_whole_gradients(trial: Trial) -> None:
    steps = inputs(3, 4, 5)
    norm = Oracle(odd(), optimizer=SETTINGS).step(steps[0]).grad_norm
    follows_oracle(trial, odd, steps, max_grad_norm=norm / 8)


@assertion(
    f"{TESTS}_state_dict.py::TestFullyShardStateDictMultiThread::test_rank0_offload_full_state_dict",
    "The full weights of a sharded model on the first rank are those of the whole model, in order; other ranks have "
    "none.",
)
def full_weights_are_on_the_first_rank_only_and_in_order(trial: Trial) -> None:
    masters = start(trial, odd()).master_state()
    want = dict(odd().named_parameters()) if trial.rank == 0 else {}
    assert list(masters) == list(want)
    for name, weight in masters.items():
        assert weight.device.type == "cpu"
        assert torch.equal(weight, want[name])


@assertion(
    f"{TESTS}_training.py::TestFullyShard1DTrainingCore::test_non_root_forward_backward",
    "A forward and backward through a part of the model after one of the whole trains that part as in one process.",
    ranks=(2, 3),
    refused=dict.fromkeys(("native-3", "deepspeed-3"), "outside a forward of the engine"),
)
def a_part_of_the_model_that_is_called_itself_trains(trial: Trial) -> None:
    """On one rank stage 3 of native shards nothing, and trains it."""
    engine, plain = trial.engine(odd(), optimizer=PLAIN_SGD, max_grad_norm=None), odd()
    x = torch.linspace(-1, 1, 15).view(3, 5)
    for part in (False, True):
        plain.zero_grad(set_to_none=True)
        expected = (plain.layers[0](x).square().mean()) if part else plain(x)
        expected.backward()
        loss = engine.module.layers[0](x).square().mean() if part else engine(x)
        engine.backward(loss)
        assert engine.step().loss == pytest.approx(expected.item(), rel=1e-6)
        with torch.no_grad():
            for parameter in plain.parameters():
                if parameter.grad is not None:
                    parameter -= parameter.grad
    for name, weight in engine.master_state().items():
        torch.testing.assert_close(weight, plain.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)


assertion(
    f"{TESTS}_training.py::TestFullyShardGradientAccumulation::test_1f1b_microbatching",
    "If all forwards of several micro-batches run before the backwards, the gradients are those of taking turns.",
)(forwards_that_run_before_the_first_backward_have_their_gradients)

assertion(
    f"{TESTS}_mixed_precision.py::TestFullyShardMixedPrecisionTraining::test_grad_acc_with_reduce_dtype",
    "Gradients of micro-batches that compute in BF16 are accumulated and reduced in FP32.",
)(bf16_gradients_are_summed_in_fp32)

assertion(
    f"{TESTS}_training.py::TestFullyShardSharedParams::test_train_shared_params_uneven_shard",
    "Every row of a tied weight is trained, also those in the short shard of the last rank.",
)(all_rows_of_a_tied_weight_are_updated_on_uneven_ranks)
