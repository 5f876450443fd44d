"""Faults of large trainers in an update: old weights, a wrong step number, lost addends, equal noise, side losses."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

import dtrain
from tests.corpus.rows import fault
from tests.corpus.training import follows_oracle, seeded, start, step_of
from tests.engines.checks.checkpoints import loads_what_any_other_saved
from tests.engines.matrix import Trial

Steps = list[list[tuple[dict[str, Any], float]]]


class Ordered(nn.Module):
    """Blocks that run in the order of each micro-batch, which is not that of their declaration."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for place in order:
            x = x + torch.tanh(self.blocks[place](x))
        return x.float().square().mean()


@fault(
    "NVIDIA/Megatron-LM#950",
    "With gathers that overlap the forward, modules that run in another order than their parameter buckets use the "
    "weights of the previous step.",
    peers="Megatron-LM core",
    precisions=("bf16", "fp32"),
)
def blocks_that_run_in_another_order_than_declared_have_the_new_weights(trial: Trial) -> None:
    draw = torch.Generator().manual_seed(1)
    orders = [[2, 0, 3, 1], [2, 0, 3, 1], [1, 3, 2, 0]]
    steps: Steps = [
        [({"x": torch.randn(3, 5, generator=draw), "order": order}, 1.0) for _ in range(6)] for order in orders
    ]
    follows_oracle(trial, lambda: seeded(Ordered), steps)


LR, EPS = 0.1, 1e-2


def inputs(infinite: bool = False) -> list[tuple[dict[str, Tensor], float]]:
    """Six micro-batches whose mean gradient is ``mean_gradient``."""
    x = torch.arange(30, dtype=torch.float32).view(6, 1, 5) / 16 - 1
    return [({"input": torch.full_like(x[i], torch.inf) if infinite else x[i]}, 1.0) for i in range(6)]


def mean_output(model: Any, micro_batch: Any) -> Tensor:
    return model(**micro_batch).float().mean()  # type: ignore[no-any-return]


@fault(
    "NVIDIA/Megatron-LM#5974",
    "The step that allocates the optimizer's states for a load counts, so the first update of Adam is about 1.3 times "
    "too small.",
    peers="Megatron-FSDP",
)
def the_first_update_of_adam_is_that_of_step_one_after_a_load_or_a_skip_too(trial: Trial) -> None:
    """With moments of zero the first update is lr x g / (|g| + eps), whatever the betas are."""
    gradient = torch.stack([micro_batch["input"] for micro_batch, _ in inputs()]).mean(dim=0)
    want = -LR * gradient / (gradient.abs() + EPS)
    for way in ("fresh", "loaded", "skipped"):
        optimizer = dtrain.AdamW(lr=LR, eps=EPS, betas=(0.9, 0.95), weight_decay=0.0)
        model = nn.Linear(5, 1, bias=False)
        nn.init.zeros_(model.weight)
        engine = start(trial, model, optimizer=optimizer)
        if way == "loaded":
            engine.save(trial.folder)
            engine.load(trial.folder)
        if way == "skipped":
            assert not step_of(engine, inputs(infinite=True), mean_output).applied
        assert step_of(engine, inputs(), mean_output).applied
        for weight in engine.master_state().values():
            torch.testing.assert_close(weight, want, rtol=1e-5, atol=0)


@fault(
    "pytorch/torchtitan#275",
    "The state of the learning rate's schedule is not in the checkpoint, so that a resumed run begins it at step 0.",
    peers="torchtitan",
)
def a_resumed_run_goes_on_at_its_place_in_the_schedule(trial: Trial) -> None:
    def run(num_steps: int, load: bool) -> list[float]:
        schedule = dtrain.Schedule(lambda step: 1 / (step + 1))
        engine = start(trial, nn.Linear(5, 1, bias=False), schedule=schedule)
        if load:
            engine.load(trial.folder)
        rates = [step_of(engine, inputs(), mean_output).lr for _ in range(num_steps)]
        engine.save(trial.folder)
        return rates

    rates = [*run(2, load=False), *run(2, load=True)]
    assert all(math.isclose(rate, 0.01 / (step + 1), rel_tol=1e-9) for step, rate in enumerate(rates)), rates


class Scaled(nn.Module):
    """An embedding whose gradient is ``factor`` in the row that is looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 5)

    def forward(self, factor: Tensor) -> Tensor:
        return (self.embedding(torch.tensor([1])).float() * factor).sum()


@fault(
    "NVIDIA-NeMo/Speech#6297",
    "Gradients of the embedding that are to be summed in FP32 are summed in BF16.",
    peers="NeMo with its distributed Adam",
    precisions=("bf16",),
)
def small_gradients_are_not_lost_beside_a_large_one(trial: Trial) -> None:
    """In BF16 256 + 1 is 256: of five micro-batches beside the large one nothing would be left."""
    engine = start(trial, seeded(Scaled), optimizer=dtrain.SGD(lr=1.0, weight_decay=0.0))
    before = {name: master.clone() for name, master in engine.master_state().items()}
    outcome = step_of(engine, [({"factor": torch.tensor(float(2**8 if i == 0 else 1))}, 1.0) for i in range(6)])
    mean = (2**8 + 5) / 6
    assert math.isclose(outcome.grad_norm, mean * math.sqrt(5), rel_tol=1e-5), outcome
    for name, master in engine.master_state().items():
        want = torch.zeros(3, 5)
        want[1] = -mean
        torch.testing.assert_close(master - before[name], want, rtol=1e-5, atol=1e-5)


class _SideLoss(torch.autograd.Function):
    """Identity that sends a gradient of 1 into a second loss, which the loop never sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, side_loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad, torch.ones((), dtype=torch.float32)


class Balanced(nn.Module):
    """A gate with a balancing loss of its own, as mixtures of experts have it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(4, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        side_loss = 0.3 * gate.float().softmax(dim=-1).mean(dim=0).square().sum()
        return self.head(torch.tanh(_SideLoss.apply(gate, side_loss))).float().square().mean()  # type: ignore[no-any-return]


@fault(
    "NVIDIA/Megatron-LM#4070",
    "An auxiliary loss whose gradient is added in the backward is not averaged over micro-batches, so that its weight "
    "grows with their number.",
    peers="Megatron-LM core",
    precisions=("fp32", "bf16"),
)
def a_side_loss_that_enters_in_the_backward_is_averaged_as_the_loss(trial: Trial) -> None:
    draw = torch.Generator().manual_seed(1)
    steps: Steps = [[({"x": torch.randn(3, 4, generator=draw)}, 1.0 + i) for i in range(6)] for _ in range(2)]
    follows_oracle(trial, lambda: seeded(Balanced), steps)


class Noisy(nn.Module):
    """Draws noise in each forward, as diffusion models do, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 1)
        self.drawn: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape)
        self.drawn.append(noise.double().sum().item())
        return self.linear(x + noise).float().square().mean()


@fault(
    "pytorch/torchtitan#1946",
    "Ranks that replicate the weights draw the same noise, because they have the same seed.",
    peers="torchtitan",
)
def noise_in_a_forward_differs_between_ranks_micro_batches_and_steps(trial: Trial) -> None:
    """Though the user has seeded all ranks alike."""
    torch.manual_seed(3)
    model = seeded(Noisy)
    engine = start(trial, model)
    for _ in range(3):
        torch.save(model.drawn, trial.folder / f"{trial.rank}.pt")  # by the end of a step all ranks have done so
        assert step_of(engine, [({"x": torch.ones(3, 5)}, 1.0) for _ in range(6)]).applied
    drawn = [draw for rank in range(trial.ranks) for draw in torch.load(trial.folder / f"{rank}.pt")]
    assert len(drawn) == 12
    assert all(abs(one - other) > 1e-6 for one, other in combinations(drawn, 2)), drawn


fault(
    "areal-project/AReaL#1468",
    "A load of a distributed checkpoint drops the optimizer's moments.",
    peers="AReaL with Megatron-LM core 0.17",
)(loads_what_any_other_saved)
