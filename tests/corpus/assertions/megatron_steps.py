"""Megatron-LM: the mean over ranks and micro-batches, sums in FP32, and which weights a forward and a backward find."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import dtrain
from tests.corpus.assertions.olmo_steps import each_update_is_at_the_rate_of_warmup_and_cosine
from tests.corpus.rows import assertion
from tests.corpus.training import follows_oracle, seeded, step_of
from tests.engines.matrix import Trial

FULLY_SHARD = "NVIDIA/Megatron-LM tests/unit_tests/distributed/mfsdp_v2/test_fully_shard.py"
SUM = "NVIDIA/Megatron-LM tests/unit_tests/distributed/test_reduce_scatter_with_fp32_accumulation.py"
BUFFER = "NVIDIA/Megatron-LM tests/unit_tests/distributed/test_param_and_grad_buffer.py"
SCHEDULER = "NVIDIA/Megatron-LM tests/unit_tests/test_optimizer_param_scheduler.py"

Given = Sequence[tuple[Mapping[str, Any], float]]


def start_sgd(trial: Trial, model: nn.Module, lr: float = 1.0, **options: Any) -> Any:
    """The engine of the trial with plain SGD, whose update of a master is ``lr`` times the gradient."""
    optimizer = dtrain.SGD(lr=lr, momentum=0.0)
    return trial.engine(model, **{"optimizer": optimizer, "max_grad_norm": None, **options})


def constant(out_features: int, value: float = 1.0) -> nn.Linear:
    """A Linear of one input, all weights equal."""
    linear = nn.Linear(1, out_features, bias=False)
    nn.init.constant_(linear.weight, value)
    return linear


def total(model: Callable[..., Tensor], micro_batch: Mapping[str, Any]) -> Tensor:
    """The sum of a model's output; its gradient in the weight of a Linear is the input."""
    return model(micro_batch["x"]).float().sum()


def two_layers() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)))


def squared_error(model: Callable[..., Tensor], micro_batch: Mapping[str, Any]) -> Tensor:
    return (model(micro_batch["x"]).float() - micro_batch["target"]).square().mean()


@assertion(
    f"{FULLY_SHARD}::test_fully_shard_sgd_losses_match_baseline",
    "Whether weights, gradients or states are sharded or not, the losses of several SGD steps are those of one rank.",
)
def every_sharding_has_the_losses_of_sgd_on_one_rank(trial: Trial) -> None:
    plain = two_layers()
    engine, optimizer = start_sgd(trial, two_layers(), lr=0.05), torch.optim.SGD(plain.parameters(), lr=0.05)
    draw = torch.Generator().manual_seed(1)
    for _ in range(4):
        given: Given = [
            ({"x": torch.randn(2, 7, generator=draw), "target": torch.randn(2, 3, generator=draw)}, 1.0)
            for _ in range(6)
        ]
        optimizer.zero_grad()
        loss = torch.stack([squared_error(plain, micro_batch) for micro_batch, _ in given]).mean()
        loss.backward()
        optimizer.step()
        assert math.isclose(step_of(engine, given, squared_error).loss, loss.item(), rel_tol=1e-5)


@assertion(
    f"{FULLY_SHARD}::test_backward_averages_across_dp_and_accumulates_across_calls",
    "Each backward averages its gradient over the ranks, and the means of several backwards add up, exactly.",
)
def backwards_average_over_ranks_and_add_up(trial: Trial) -> None:
    """Two micro-batches a rank, whose inputs are its number; ``grad_factor`` makes a sum of the mean over them."""
    engine = start_sgd(trial, constant(5))
    for _ in engine.accumulate(range(2)):
        engine.backward(total(engine, {"x": torch.full((1, 1), trial.rank + 1.0)}))
    outcome = engine.step(grad_factor=2.0)
    mean = (trial.ranks + 1) / 2
    assert math.isclose(outcome.grad_norm, 2 * mean * math.sqrt(5), rel_tol=1e-6)
    for weight in engine.master_state().values():
        assert weight.eq(1.0 - 2 * mean).all(), weight


@assertion(
    f"{FULLY_SHARD}::test_next_forward_uses_optimizer_updated_weights",
    "The forward after a step computes with the weights that this step has updated.",
    precisions=("bf16", "fp32"),
)
def a_forward_finds_the_weights_of_the_step_before(trial: Trial) -> None:
    """In training, in evaluation and again after a second step; all values are exact in BF16."""
    engine = start_sgd(trial, constant(5), lr=0.25)
    one = {"x": torch.ones(1, 1)}
    for weight in (1.0, 0.75, 0.5):
        with engine.eval():
            assert total(engine, one).item() == 5 * weight
        assert step_of(engine, [(one, 1.0)] * trial.ranks, total).loss == 5 * weight


class _KeepsView(torch.autograd.Function):
    """A product that keeps a view of a weight for its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, view: Tensor) -> Tensor:
        ctx.save_for_backward(x, view)
        return x * view

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, view = ctx.saved_tensors
        return grad * view, (grad * x).sum(0)


class Scaled(nn.Module):
    """Multiplies by a view of its weight; what comes before it needs that view in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)
        self.scale = nn.Parameter(torch.rand(7) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = _KeepsView.apply(torch.tanh(self.inner(x)), self.scale.view_as(self.scale))
        return kept


def scaled() -> nn.Module:
    return seeded(lambda: nn.ModuleDict({"blocks": nn.Sequential(Scaled(), Scaled(), nn.Linear(7, 1))})["blocks"])


@assertion(
    f"{FULLY_SHARD}::test_non_leaf_parameter_view_survives_storage_resize",
    "A view of a weight that an autograd function saves in the forward has the weight's values in the backward.",
)
def a_saved_view_of_a_weight_has_its_values_in_the_backward(trial: Trial) -> None:
    draw = torch.Generator().manual_seed(2)
    steps = [[({"x": torch.randn(3, 7, generator=draw)}, 1.0) for _ in range(6)] for _ in range(2)]

    def loss(model: Callable[..., Tensor], micro_batch: Mapping[str, Any]) -> Tensor:
        return model(micro_batch["x"]).float().square().mean()

    follows_oracle(trial, scaled, steps, loss=loss)


@assertion(
    f"{SUM}::TestReduceScatterWithFP32Accumulation::test_reduce_scatter_with_fp32_accumulation",
    "BF16 gradients of several ranks are summed in FP32; a sum in BF16 has other bits.",
    precisions=("bf16",),
    ranks=(3, 2, 1),
)
def bf16_gradients_are_summed_in_fp32(trial: Trial) -> None:
    """256 + 1 is 256 in BF16, whether the ones come from other ranks or from later micro-batches."""
    engine = start_sgd(trial, constant(5, 0.0))
    values = [256.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    step_of(engine, [({"x": torch.full((1, 1), value)}, 1.0) for value in values], total)
    for weight in engine.master_state().values():
        assert weight.eq(-sum(values) / 6).all(), weight


class Sum(nn.Module):
    """The sum of all its parameters, of which none has a size that two or three ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((5, 7), (7,), (), (1,), (3, 1, 5), (11,))
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def forward(self) -> Tensor:
        return torch.stack([weight.sum() for weight in self.weights]).sum()


@assertion(
    f"{BUFFER}::test_optimizer_shards_cover_every_param",
    "The ranks' shares together have every element of every parameter, even of scalars, for update and norm.",
    refused={"deepspeed-3": "has no dimensions"},
)
def every_element_is_in_the_update_and_counts_once_in_the_norm(trial: Trial) -> None:
    engine = start_sgd(trial, Sum(), lr=0.5)
    numel = sum(parameter.numel() for parameter in Sum().parameters())
    outcome = step_of(engine, [({}, 1.0)] * trial.ranks, lambda model, _: model().float())
    assert engine.num_parameters == numel
    assert math.isclose(outcome.grad_norm, math.sqrt(numel), rel_tol=1e-6)
    if masters := engine.master_state():
        assert sum(weight.numel() for weight in masters.values()) == numel
        assert all(weight.eq(-0.5).all() for weight in masters.values())


assertion(
    f"{SCHEDULER}::test_get_lr_cosine",
    "After the warm-up the learning rate falls from the largest to the smallest along half a cosine of the steps.",
)(each_update_is_at_the_rate_of_warmup_and_cosine)
