"""A generator and a discriminator, each under an engine of its own, train as in plain PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import dtrain
from dtrain.engine.step import StepEngine
from dtrain.errors import UsageError
from tests.engines.helpers import held, same
from tests.helpers.one_rank import start as start_one
from tests.helpers.ranks import run_ranks

ROUNDS, BATCH = 4, 8
LR = {"g": 1e-2, "d": 2e-2}
ENGINES = [("native", 0), ("native", 1), ("native", 2), ("native", 3), ("ddp", 0), ("fsdp2", 2), ("fsdp2", 3)]
KINDS = ["gan", "wgan-gp", "penalty first", "penalty, then scores"]
SHARDED = [("native", 2), ("native", 3), ("ddp", 0), ("fsdp2", 2), ("fsdp2", 3)]
"""Those that are tried on two ranks."""
Model = Callable[[Tensor], Tensor]
Masters = dict[str, dict[str, Tensor]]


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
        self.unused = nn.Parameter(torch.ones(3))  # a vector: weight decay leaves it as it is

    def forward(self, z: Tensor) -> Tensor:
        output: Tensor = self.layers(z)
        return output


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 1)

    def forward(self, x: Tensor, is_checkpointed: bool) -> Tensor:
        output: Tensor = checkpoint(self.linear, x, use_reentrant=False) if is_checkpointed else self.linear(x)
        return output


class Discriminator(nn.Module):
    """Piecewise linear and smooth layers, through which the backward of a gradient penalty takes different ways.

    Activation checkpointing of its head as a unit and of a part of it, in turn.
    """

    def __init__(self) -> None:
        super().__init__()
        units = [nn.Linear(4, 6), nn.LayerNorm(6), nn.LeakyReLU(0.2), nn.Linear(6, 5), nn.Tanh(), Head()]
        self.layers = nn.Sequential(*units)
        self.unused = nn.Parameter(torch.ones(3))
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        *inner, head = self.layers
        for layer in inner:
            x = layer(x)
        if self.num_calls % 2:
            return head(x, True)  # type: ignore[no-any-return]
        return checkpoint(head, x, False, use_reentrant=False)  # type: ignore[no-any-return]


def models() -> dict[str, nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {"g": Generator(), "d": Discriminator()}


def data(number: int, rank: int, world: int) -> list[Tensor]:
    """Real samples and two draws of noise, of one rank."""
    generator = torch.Generator().manual_seed(number)
    whole = [torch.randn(BATCH, dim, generator=generator) for dim in (4, 3, 3)]
    return [tensor.chunk(world)[rank] for tensor in whole]


def penalty(d: Model, real: Tensor, fake: Tensor) -> Tensor:
    share = torch.sigmoid(real.sum(dim=1, keepdim=True))  # of each sample alone, so equal at any number of ranks
    mixed = (share * real + (1 - share) * fake).requires_grad_()
    (grad,) = torch.autograd.grad(d(mixed).sum(), mixed, create_graph=True)
    return (grad.norm(dim=1) - 1).square().mean()


def d_loss(kind: str, d: Model, real: Tensor, fake: Tensor) -> Tensor:
    if kind == "gan":
        return softplus(-d(real)).mean() + softplus(d(fake)).mean()
    if kind == "penalty first":  # its graph is then the last that backward visits
        return 10 * penalty(d, real, fake) + d(fake).mean() - d(real).mean()
    loss = d(fake).mean() - d(real).mean() + 10 * penalty(d, real, fake)
    if kind == "penalty, then scores":  # a forward between the penalty and its backward
        with torch.no_grad():
            d(real)
    return loss


def g_loss(kind: str, d: Model, fake: Tensor) -> Tensor:
    return softplus(-d(fake)).mean() if kind == "gan" else -d(fake).mean()


def train(
    kind: str, g: Model, d: Model, update: Callable[[str, Tensor], None], *, rank: int = 0, world: int = 1
) -> None:
    for number in range(ROUNDS):
        real, noise, other = data(number, rank, world)
        update("d", d_loss(kind, d, real, g(noise).detach()))
        update("g", g_loss(kind, d, g(other)))


def plain(kind: str) -> Masters:
    """The weights after the same loop in plain PyTorch."""
    built = models()
    optimizers = {}
    for name, model in built.items():
        classes = [[p for p in model.parameters() if (p.dim() > 1) == decayed] for decayed in (True, False)]
        groups = [{"params": own, "weight_decay": decay} for own, decay in zip(classes, (0.1, 0.0), strict=True)]
        optimizers[name] = torch.optim.AdamW(groups, lr=LR[name], betas=(0.9, 0.95))

    def update(name: str, loss: Tensor) -> None:
        optimizers[name].zero_grad()
        loss.backward()
        optimizers[name].step()

    train(kind, built["g"], built["d"], update)
    return {name: {key: p.detach() for key, p in model.named_parameters()} for name, model in built.items()}


def start(engine: str, zero_stage: int, **options: Any) -> dict[str, StepEngine]:
    torch.set_num_threads(1)
    settings = {"precision": "fp32", "max_grad_norm": None, "seed": 0, **options}
    return {
        name: dtrain.initialize(
            model, optimizer=dtrain.AdamW(lr=LR[name]), engine=engine, zero_stage=zero_stage, **settings
        )
        for name, model in models().items()
    }


def frozen(model: nn.Module, is_frozen: bool) -> None:
    for p in model.parameters():
        p.requires_grad_(not is_frozen)


def under_engines(
    rank: int, world: int, engine: str, zero_stage: int, kind: str, freezes: bool, precision: str = "fp32"
) -> Masters:
    engines = start(engine, zero_stage, precision=precision)

    def update(name: str, loss: Tensor) -> None:
        engines[name].backward(loss)
        assert engines[name].step().applied

    def d(x: Tensor) -> Tensor:
        is_of_g = x.requires_grad and not x.is_leaf  # not the mixed samples of a penalty
        frozen(engines["d"].module, freezes and is_of_g)
        output: Tensor = engines["d"](x)
        return output

    train(kind, engines["g"], d, update, rank=rank, world=world)
    return {name: engine.master_state() for name, engine in engines.items()}


def largest_difference(found: Masters, expected: Masters) -> float:
    assert {name: set(own) for name, own in found.items()} == {name: set(own) for name, own in expected.items()}
    return max(float((found[m][name] - want).abs().max()) for m, own in expected.items() for name, want in own.items())


def differences(rank: int, world: int, engine: str, zero_stage: int, freezes: bool = False) -> dict[str, float]:
    """By kind of loop, the largest difference to plain PyTorch; of rank 0."""
    kinds = KINDS[:1] if (engine, zero_stage) == ("deepspeed", 3) else KINDS
    found = {kind: under_engines(rank, world, engine, zero_stage, kind, freezes) for kind in kinds}
    return {kind: largest_difference(own, plain(kind)) for kind, own in found.items()} if rank == 0 else {}


def refuses_a_backward_and_clipping_by_hand(engine: StepEngine) -> None:
    with pytest.warns(UserWarning, match=f"on parameters of engine={engine.name} finds no gradient"):
        clip_grad_norm_(engine.module.parameters(), 1.0)
    with pytest.raises(UsageError, match=r"got a gradient outside engine.backward; call engine.backward\(loss\)"):
        engine(data(0, 0, 1)[0]).mean().backward()


def on_one_rank(rank: int, world: int, engine: str, zero_stage: int) -> dict[str, float]:
    found = differences(rank, world, engine, zero_stage)
    rounded = under_engines(rank, world, engine, zero_stage, "wgan-gp", False, precision="bf16")
    assert largest_difference(rounded, plain("wgan-gp")) < 0.1  # an update moves a weight by up to LR
    refuses_a_backward_and_clipping_by_hand(start(engine, zero_stage)["d"])
    return found


@pytest.mark.processes
@pytest.mark.parametrize(("engine", "zero_stage"), ENGINES)
def test_both_train_as_in_plain_pytorch(engine: str, zero_stage: int) -> None:
    (found,) = run_ranks(1, on_one_rank, engine, zero_stage)
    assert len(found) == 4
    assert max(found.values()) < 1e-6, found


@pytest.mark.processes
@pytest.mark.parametrize(("engine", "zero_stage"), SHARDED)
def test_both_train_as_in_plain_pytorch_on_two_ranks(engine: str, zero_stage: int) -> None:
    found = run_ranks(2, on_two_ranks, engine, zero_stage)[0]
    assert len(found) == 4
    assert max(found.values()) < 1e-6, found


def on_two_ranks(rank: int, world: int, engine: str, zero_stage: int) -> dict[str, float]:
    found = differences(rank, world, engine, zero_stage)
    keeps_what_it_has_accumulated(rank, engine, zero_stage)
    return found


def keeps_what_it_has_accumulated(rank: int, engine: str, zero_stage: int) -> None:
    """The generator's backward, also one with an Inf, between two micro-batches changes no bit of the discriminator."""
    alone, engines = start(engine, zero_stage)["d"], start(engine, zero_stage)
    g, d = engines["g"], engines["d"]
    for step, factor in enumerate((1.0, float("inf"))):
        batch = [data(10 * step + number, rank, 2) for number in range(2)]
        for real, noise, _ in alone.accumulate(batch):
            alone.backward(d_loss("wgan-gp", alone, real, noise.repeat(1, 2)[:, :4]))
        for index, (real, noise, other) in enumerate(d.accumulate(batch)):
            d.backward(d_loss("wgan-gp", d, real, noise.repeat(1, 2)[:, :4]))
            if index == 0:
                g.backward(g_loss("gan", d, g(other)) * factor)
                assert zero_stage < 3 or not d.memory()["unsharded"]
                assert g.step().applied == (step == 0)
        outcomes = alone.step(), d.step()
        assert outcomes[0].grad_norm == outcomes[1].grad_norm > 0
        assert same(held(alone), held(d))


# -- DeepSpeed, whose own hooks take every gradient: the discriminator is frozen meanwhile -----------------------------


def under_deepspeed(rank: int, world: int, zero_stage: int) -> dict[str, float]:
    found = differences(rank, world, "deepspeed", zero_stage, freezes=True)
    if zero_stage == 3:
        with pytest.raises(UsageError, match=r"create_graph=True\) with engine=deepspeed at zero_stage=3"):
            under_engines(rank, world, "deepspeed", zero_stage, "wgan-gp", True)
    with pytest.raises(UsageError, match=r"freeze.*for p in d.parameters\(\): p.requires_grad_\(False\)"):
        under_engines(rank, world, "deepspeed", zero_stage, "gan", False)
    under_engines(rank, world, "deepspeed", zero_stage, "gan", True, precision="bf16")
    refuses_a_backward_and_clipping_by_hand(start("deepspeed", zero_stage)["d"])
    return found


@pytest.mark.deepspeed
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_deepspeed_trains_both_if_one_is_frozen(zero_stage: int) -> None:
    (found,) = run_ranks(1, under_deepspeed, zero_stage)
    assert len(found) == (1 if zero_stage == 3 else 4)
    assert max(found.values()) < 1e-6, found


# -- clipping by hand --------------------------------------------------------------------------------------------------


@contextmanager
def recorded() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


@pytest.mark.parametrize(
    ("name", "message"), [("native", "no gradient, so it has no"), ("ddp", "not averaged yet")], ids=["native", "ddp"]
)
def test_clipping_by_hand_warns_once_per_engine(name: str, message: str) -> None:
    engine, other = start_one(engine=name), start_one()
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    with recorded() as found:
        for _ in range(2):
            clip_grad_norm_(engine.module.parameters(), 1.0)
    assert [message in str(warning.message) for warning in found] == [True]
    assert (found[0].category, found[0].filename) == (UserWarning, __file__)
    with recorded() as found:
        clip_grad_norm_(other.module[0].weight, 1.0)
    assert len(found) == 1


def test_clipping_of_other_parameters_works_as_ever() -> None:
    engine, plain_model = start_one(), nn.Linear(2, 2)
    plain_model(torch.full((1, 2), 100.0)).sum().backward()
    with recorded() as found:
        clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0)  # no gradient, and no engine
        norm = clip_grad_norm_([*plain_model.parameters(), *engine.module.parameters()], 1.0)
    assert not found
    assert norm > 100
    assert torch.isclose(torch.cat([p.grad.flatten() for p in plain_model.parameters()]).norm(), torch.tensor(1.0))
