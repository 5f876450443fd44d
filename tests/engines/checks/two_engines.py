"""A generator and a discriminator, each under an engine of its own, train as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.checkpoint import checkpoint

import dtrain
from dtrain.engine.step import StepEngine
from dtrain.errors import UsageError
from tests.engines.helpers import held, same
from tests.engines.matrix import Trial, check
from tests.helpers.net import Net

ROUNDS, BATCH = 4, 8
LR = {"g": 1e-2, "d": 2e-2}
KINDS: dict[str, dict[str, Any]] = {kind: {} for kind in ("gan", "wgan-gp", "penalty-first", "penalty-then-scores")}
Model = Callable[[Tensor], Tensor]
Masters = dict[str, dict[str, Tensor]]


def head(net: Any, x: Tensor, is_checkpointed: bool) -> Any:
    return checkpoint(net.linear, x, use_reentrant=False) if is_checkpointed else net.linear(x)


class Discriminator(nn.Module):
    """Piecewise linear and smooth layers, through which the backward of a gradient penalty takes different ways.

    Activation checkpointing of its head as a unit and of a part of it, in turn.
    """

    def __init__(self) -> None:
        super().__init__()
        units = [nn.Linear(4, 6), nn.LayerNorm(6), nn.LeakyReLU(0.2), nn.Linear(6, 5), nn.Tanh()]
        self.layers = nn.Sequential(*units, Net(head, linear=nn.Linear(5, 1)))
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
        layers = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
        unused = nn.Parameter(torch.ones(3))  # a vector: weight decay leaves it as it is
        return {"g": Net(lambda net, z: net.layers(z), layers=layers, unused=unused), "d": Discriminator()}


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
    if kind == "penalty-first":  # its graph is then the last that backward visits
        return 10 * penalty(d, real, fake) + d(fake).mean() - d(real).mean()
    loss = d(fake).mean() - d(real).mean() + 10 * penalty(d, real, fake)
    if kind == "penalty-then-scores":  # a forward between the penalty and its backward
        with torch.no_grad():
            d(real)
    return loss


def g_loss(kind: str, d: Model, fake: Tensor) -> Tensor:
    return softplus(-d(fake)).mean() if kind == "gan" else -d(fake).mean()


def train(kind: str, g: Model, d: Model, update: Callable[[str, Tensor], None], rank: int = 0, world: int = 1) -> None:
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


def start(trial: Trial) -> dict[str, Any]:
    return {
        name: trial.engine(model, optimizer=dtrain.AdamW(lr=LR[name]), max_grad_norm=None)
        for name, model in models().items()
    }


def under_engines(trial: Trial, *, freezes: bool) -> Masters:
    engines, kind = start(trial), trial.case.variant

    def update(name: str, loss: Tensor) -> None:
        engines[name].backward(loss)
        assert engines[name].step().applied

    def d(x: Tensor) -> Tensor:
        is_of_g = x.requires_grad and not x.is_leaf  # not the mixed samples of a penalty
        for parameter in engines["d"].module.parameters():
            parameter.requires_grad_(not (freezes and is_of_g))
        return engines["d"](x)

    train(kind, engines["g"], d, update, rank=trial.rank, world=trial.ranks)
    return {name: engine.master_state() for name, engine in engines.items()}


def require_close(trial: Trial, found: Masters, expected: Masters) -> None:
    for model, own in expected.items() if trial.rank == 0 else ():
        assert found[model].keys() == own.keys()
        for name, want in own.items():
            # in BF16, an update moves a weight by up to the learning rate
            tolerance = 1e-6 if trial.case.precision == "fp32" else 0.1
            torch.testing.assert_close(found[model][name], want, rtol=0, atol=tolerance)


def refuses_a_backward_by_hand(engine: StepEngine) -> None:
    engine.backward(engine(data(0, 0, 1)[0]).mean())
    engine.step()
    with pytest.raises(UsageError, match=r"got a gradient outside engine.backward; call engine.backward\(loss\)"):
        engine(data(0, 0, 1)[0]).mean().backward()


@check(engines=("native", "ddp", "fsdp2"), precisions=("fp32", "bf16"), ranks=(2, 1), variants=KINDS)
def two_engines_train_as_plain_pytorch(trial: Trial) -> None:
    require_close(trial, under_engines(trial, freezes=False), plain(trial.case.variant))
    if trial.ranks == 1:
        refuses_a_backward_by_hand(start(trial)["d"])


@check(engines=("native", "ddp", "fsdp2"))
def one_engine_keeps_what_it_has_accumulated_while_another_steps(trial: Trial) -> None:
    """The generator's backward, also one with an Inf, between two micro-batches changes no bit of the discriminator."""
    alone, engines = start(trial)["d"], start(trial)
    g, d = engines["g"], engines["d"]
    for step, factor in enumerate((1.0, float("inf"))):
        batch = [data(10 * step + number, trial.rank, 2) for number in range(2)]
        for real, noise, _ in alone.accumulate(batch):
            alone.backward(d_loss("wgan-gp", alone, real, noise.repeat(1, 2)[:, :4]))
        for index, (real, noise, other) in enumerate(d.accumulate(batch)):
            d.backward(d_loss("wgan-gp", d, real, noise.repeat(1, 2)[:, :4]))
            if index == 0:
                g.backward(g_loss("gan", d, g(other)) * factor)
                assert trial.case.stage < 3 or not d.memory()["unsharded"]
                assert g.step().applied == (step == 0)
        outcomes = alone.step(), d.step()
        assert outcomes[0].grad_norm == outcomes[1].grad_norm > 0
        assert same(held(alone), held(d))


@check(
    engines=("deepspeed",),
    stages=(0, 2, 3),
    ranks=(1,),
    variants=KINDS,
    unless=lambda case: case.stage == 3 and case.variant == "penalty-then-scores",
)
def two_engines_of_deepspeed_train_if_one_is_frozen(trial: Trial) -> None:
    """Its own hooks take every gradient, so the discriminator is frozen meanwhile."""
    if trial.case.stage == 3 and trial.case.variant != "gan":
        with pytest.raises(UsageError, match=r"create_graph=True\) with engine=deepspeed at zero_stage=3"):
            under_engines(trial, freezes=True)
        return
    require_close(trial, under_engines(trial, freezes=True), plain(trial.case.variant))
    if trial.case.variant == "gan":
        with pytest.raises(UsageError, match=r"freeze.*for p in d.parameters\(\): p.requires_grad_\(False\)"):
            under_engines(trial, freezes=False)
    refuses_a_backward_by_hand(start(trial)["d"])
