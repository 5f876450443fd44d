"""TransformerEngine and Composer: masters, groups that a rank has nothing of, no tokens, branches that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import dtrain
from tests.corpus.assertions.megatron_steps import start_sgd, total
from tests.corpus.assertions.torchao_float8 import decibels
from tests.corpus.rows import assertion
from tests.corpus.training import seeded, start, step_of
from tests.engines.helpers import state_digests
from tests.engines.matrix import Trial

OPTIMIZERS = "NVIDIA/TransformerEngine tests/pytorch/test_fused_optimizer.py"
SANITY = "NVIDIA/TransformerEngine tests/pytorch/test_sanity.py"
COMPOSER = "mosaicml/composer tests/trainer/test_ddp_sync_strategy.py"


class Gated(nn.Module):
    """A matrix, and a number that has a group of its own, of which one rank holds all."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate = nn.Linear(7, 5), nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.gate


def group_steps(engine: Any, plain: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Two steps of the engine and of torch on the same micro-batches, whose masters must be equal."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(2):
        given: list[tuple[Mapping[str, Any], float]] = [
            ({"x": torch.randn(2, 7, generator=draw)}, 1.0) for _ in range(6)
        ]
        step_of(engine, given, squares)
        optimizer.zero_grad()
        torch.stack([squares(plain, micro_batch) for micro_batch, _ in given]).mean().backward()
        optimizer.step()
    for name, master in engine.master_state().items():
        torch.testing.assert_close(master, plain.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)


def squares(model: Callable[..., Tensor], micro_batch: Mapping[str, Any]) -> Tensor:
    return model(micro_batch["x"]).float().square().mean()


@assertion(
    f"{OPTIMIZERS}::TestFusedAdam::test_empty_param_group_advances_step",
    "A group of which a rank has no parameter counts its steps as on other ranks, also through a checkpoint.",
    ranks=(3, 2, 1),
)
def a_group_that_is_empty_on_a_rank_counts_its_steps(trial: Trial) -> None:
    """The bias correction follows the count; small betas make a wrong one visible."""
    groups = {"gate": {"betas": (0.6, 0.9)}}
    record = dtrain.AdamW(lr=0.05, betas=(0.5, 0.8), eps=1e-2, weight_decay=0.0, groups=groups)
    plain = seeded(Gated)
    others = [p for name, p in plain.named_parameters() if name != "gate"]
    parts = [{"params": others}, {"params": [plain.get_parameter("gate")], "betas": (0.6, 0.9)}]
    optimizer = torch.optim.AdamW(parts, lr=0.05, betas=(0.5, 0.8), eps=1e-2, weight_decay=0.0)
    first, resumed = (start(trial, seeded(Gated), optimizer=record) for _ in range(2))
    group_steps(first, plain, optimizer, seed=1)
    first.save(trial.folder)
    resumed.load(trial.folder)
    group_steps(resumed, plain, optimizer, seed=2)


@assertion(
    f"{OPTIMIZERS}::TestFusedAdam::test_bf16_model_weight_cast",
    "Masters of BF16 weights move as FP32 weights under Adam, and the weights are the masters rounded to BF16.",
    precisions=("bf16",),
)
def bf16_weights_are_the_masters_rounded(trial: Trial) -> None:
    """An identity as input shows the weights of a forward; updates are far smaller than a step between BF16 numbers."""
    plain = seeded(lambda: nn.Linear(7, 5, bias=False))
    engine = start(trial, seeded(lambda: nn.Linear(7, 5, bias=False)), optimizer=dtrain.Adam(lr=2.0**-12, eps=1e-2))
    defaults = dtrain.Adam()
    optimizer = torch.optim.Adam(
        plain.parameters(), lr=2.0**-12, eps=1e-2, betas=defaults.betas, weight_decay=defaults.weight_decay
    )
    x = torch.exp2(torch.arange(7) % 3.0).expand(1, 7)  # the gradient of every row, exact in BF16
    for _ in range(4):
        step_of(engine, [({"x": x}, 1.0)] * trial.ranks, total)
        plain.weight.grad = x.expand(5, 7).clone()
        optimizer.step()
        with engine.eval():
            seen = engine(torch.eye(7)).t()
        if masters := engine.master_state():
            torch.testing.assert_close(masters["weight"], plain.weight.detach(), rtol=0, atol=1e-7)
            assert torch.equal(seen, masters["weight"].bfloat16().float())
            assert not torch.equal(seen, masters["weight"])


@assertion(
    f"{SANITY}::test_quantized_model_init_high_precision_init_val",
    "The original FP32 weights remain available, and rounding them gives the model's weights.",
    precisions=("bf16", "fp8"),
)
def masters_have_the_initial_values_before_any_rounding(trial: Trial) -> None:
    """Also those of other ranks' shares, before the first step and from a checkpoint of it."""
    build = lambda: nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 3))  # noqa: E731
    want = seeded(build).state_dict()
    engine = start(trial, seeded(build))
    engine.save(trial.folder)
    loaded = start(trial, seeded(build, seed=1))
    loaded.load(trial.folder)
    for each in (engine, loaded):
        for name, master in each.master_state().items():
            assert torch.equal(master, want[name]), name
            assert name.endswith("bias") or not torch.equal(master, master.bfloat16().float())


class Rows(nn.Module):
    """The sum of squares over however many rows there are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).float().square().sum()


@assertion(
    f"{SANITY}::test_sanity_linear_with_zero_tokens",
    "A Linear on an input of no tokens, in FP8 too, gives an output of no tokens and a backward.",
    precisions=("fp8", "fp32", "bf16"),
)
def a_micro_batch_of_no_rows_adds_nothing(trial: Trial) -> None:
    """On some ranks and in some micro-batches, then in all of a step, whose gradients are zeros."""
    draw, plain, engine = torch.Generator().manual_seed(4), seeded(Rows), start_sgd(trial, seeded(Rows), lr=2.0**-6)
    given = [({"x": torch.randn(size, 16, generator=draw)}, 1.0) for size in (0, 3, 2, 0, 0, 4)]
    assert step_of(engine, given).applied
    (torch.stack([plain(**micro_batch) for micro_batch, _ in given]).sum() / 6).backward()
    once = engine.master_state()
    if once:
        moved = torch.cat([(once[name] - p.detach()).flatten() for name, p in plain.named_parameters()])
        want = torch.cat([-(2.0**-6) * p.grad.flatten() for p in plain.parameters() if p.grad is not None])
        assert decibels(want, moved) >= {"fp8": 17, "bf16": 35, "fp32": 80}[trial.case.precision]
    outcome = step_of(engine, [({"x": torch.zeros(0, 16)}, 1.0)] * 6)
    assert (outcome.applied, outcome.loss, outcome.grad_norm) == (True, 0.0, 0.0)
    assert all(torch.equal(master, once[name]) for name, master in engine.master_state().items())


class Choice(nn.Module):
    """Three numbers, of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.choices = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in "abc"})
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, choice: str, target: float) -> Tensor:
        return (self.choices[choice](torch.ones(1)).float() - target).square().sum()


@assertion(
    f"{COMPOSER}::test_ddp_sync_strategy",
    "If each micro-batch uses another part of the model, the gradients are still the means over all ranks' samples.",
)
def parts_that_only_some_micro_batches_use_have_the_mean_of_all(trial: Trial) -> None:
    """Losses (w - 1)^2 and (w - 2)^2 in one part and then another: -1.5 each, and no gradient in the third."""
    engine = start_sgd(trial, Choice(), lr=0.5)
    before = state_digests(engine)
    for choice in engine.accumulate(["a", "b"]):
        targets = [1.0 + rank % 2 for rank in range(trial.ranks)]
        engine.backward(engine(choice, targets[trial.rank]))
    outcome = engine.step()
    want = sum(targets) / trial.ranks  # half of the mean of 2 * target: two micro-batches
    assert abs(outcome.grad_norm - want * 2**0.5) < 1e-6
    for name, weight in engine.master_state().items():
        assert abs(weight.item() - (0.0 if "c" in name.split(".") else 0.5 * want)) < 1e-6, name
    unused = "master:choices.c.weight"
    assert state_digests(engine)[unused] == before[unused]
