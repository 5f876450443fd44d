"""DeepSpeed's tests of outputs, adapters, ties and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.corpus.assertions.deepspeed_gradients import TESTS
from tests.corpus.faults.scale_updates import a_resumed_run_goes_on_at_its_place_in_the_schedule
from tests.corpus.rows import assertion
from tests.corpus.training import MicroBatch, follows_oracle, seeded, start, step_of
from tests.engines.checks.checkpoints import loads_what_any_other_saved
from tests.engines.checks.modules import a_weight_that_leaves_its_unit_has_its_values_or_is_refused
from tests.engines.matrix import Trial

assertion(
    f"{TESTS}/runtime/zero/test_zero_context_return.py::TestReturnParam::test_ext_param_return",
    "A bias that a module returns beside its output is whole in the caller, which adds it.",
    refused={"native-3": "is sharded outside its forward (zero_stage=3); take a view or a copy"},
)(a_weight_that_leaves_its_unit_has_its_values_or_is_refused)

assertion(
    f"{TESTS}/checkpoint/test_universal_checkpoint.py::TestZeROUniversalCheckpointDP::test_dp_world_size_2to4",
    "A checkpoint that another number of ranks loads gives the same weights, optimizer states and next losses.",
)(loads_what_any_other_saved)


class ThreeOutputs(nn.Module):
    """One layer for three inputs, each with a loss of its own, returned as a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 7)

    def forward(self, inputs: list[Tensor], targets: list[Tensor]) -> tuple[Tensor, ...]:
        return tuple(F.cross_entropy(self.layer(x).float(), y) for x, y in zip(inputs, targets, strict=True))


def summed(model: Callable[..., Any], micro_batch: MicroBatch) -> Tensor:
    return sum(model(**micro_batch))  # type: ignore[return-value]


@assertion(
    f"{TESTS}/runtime/test_multi_output_model.py::TestThreeOutputModel::test",
    "The sum of three losses of one forward is divided once by the number of micro-batches.",
    precisions=("fp32", "bf16"),
)
def the_sum_of_three_losses_of_a_forward_has_the_gradients_of_all(trial: Trial) -> None:
    draw = torch.Generator().manual_seed(3)
    steps = [
        [
            (
                {
                    "inputs": [torch.randn(3, 5, generator=draw) * factor for factor in (1, 2, 3)],
                    "targets": [torch.randint(7, (3,), generator=draw) for _ in range(3)],
                },
                1.0,
            )
            for _ in range(6)
        ]
        for _ in range(2)
    ]
    follows_oracle(trial, partial(seeded, ThreeOutputs), steps, loss=summed)


class Adapted(nn.Module):
    """A frozen norm and layer with a trained low-rank adapter, recomputed in the backward; then a trained head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.base = nn.LayerNorm(5), nn.Linear(5, 5, bias=False)
        self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, 5, bias=False)
        self.head = nn.Linear(5, 3)
        for frozen in (self.norm, self.base):
            frozen.requires_grad_(False)
            for parameter in frozen.parameters():
                parameter.data = parameter.data.bfloat16().float()  # so that a cast loses nothing

    def recomputed(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return torch.tanh(self.base(x) + self.up(self.down(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.recomputed, x, use_reentrant=False) if self.training else self.recomputed(x)
        return self.head(x).float().square().mean()


@assertion(
    f"{TESTS}/v1/zero/test_zero_user_backward.py::TestZeroFrozenParamCheckpointingVariants::test_lora_style",
    "Adapters of a frozen layer inside recomputed activations have the gradients of plain data parallelism.",
    precisions=("fp32", "bf16"),
)
def adapters_of_recomputed_frozen_layers_train(trial: Trial) -> None:
    draw = torch.Generator().manual_seed(4)
    steps = [[({"x": torch.randn(4, 5, generator=draw)}, 1.0) for _ in range(6)] for _ in range(3)]
    engine = follows_oracle(trial, partial(seeded, Adapted), steps)
    fresh = dict(seeded(Adapted).named_parameters())
    for name, value in engine.states.full_frozen():
        assert torch.equal(value.float(), fresh[name]), name


class Tied(nn.Module):
    """An embedding whose weight is also that of the output; seven rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embedding(tokens)).float(), tokens)


@assertion(
    f"{TESTS}/checkpoint/test_shared_weights.py::TestCheckpointSharedWeights::test_checkpoint_shared_weights",
    "Weights from the checkpoint of a model with a tied weight load strictly into a new one, under both names.",
)
def a_checkpoint_of_tied_weights_loads_strictly_under_both_names(trial: Trial) -> None:
    engine, other = start(trial, seeded(Tied)), start(trial, seeded(Tied, seed=1))
    assert step_of(engine, [({"tokens": torch.arange(7)}, 1.0)] * trial.ranks).applied
    other.load(engine.save(trial.folder))
    with engine.full_model() as trained, other.full_model() as loaded:
        values, plain = loaded.state_dict(), seeded(Tied, seed=2)
        plain.load_state_dict(values, strict=True)
        assert sorted(values) == ["embedding.weight", "head.weight"]
        for name, want in trained.state_dict().items():
            assert torch.equal(values[name], want)
            assert torch.equal(plain.state_dict()[name], want)
        assert plain.head.weight is plain.embedding.weight
    if masters := other.master_state():
        assert torch.equal(masters["embedding.weight"], plain.embedding.weight.detach())


assertion(
    f"{TESTS}/checkpoint/test_lr_scheduler.py::TestLRSchedulerCheckpoint::test_checkpoint_lr_scheduler",
    "A loaded checkpoint restores the state of the schedule, so that the next rate is that of the run that saved.",
)(a_resumed_run_goes_on_at_its_place_in_the_schedule)
