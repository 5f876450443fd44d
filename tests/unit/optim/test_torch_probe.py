"""Optimizers that dtrain cannot give shards of the masters are refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from dtrain.config.optim import TorchOptimizer
from dtrain.errors import ConfigError
from dtrain.optim.rules import rule_of


class Updating(Optimizer):
    """Base of the classes below: an update of one parameter."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.built_lr = lr

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.move(group, p, self.state[p])

    def move(self, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
        raise NotImplementedError


Move = Callable[[Any, dict[str, Any], Any, dict[str, Any]], Any]


def updating(name: str, move: Move) -> type[Updating]:
    return type(name, (Updating,), {"move": move})


def lamb(self: Updating, group: dict[str, Any], p: Any, state: dict[str, Any]) -> None:
    """LAMB without its second moment."""
    state.setdefault("exp_avg", torch.zeros_like(p)).lerp_(p.grad, 0.1)
    update = state["exp_avg"] + group["weight_decay"] * p
    p.sub_(group["lr"] * p.norm() / update.norm() * update)


def lars(self: Updating, group: dict[str, Any], p: Any, state: dict[str, Any]) -> None:
    """Needs whole tensors only for a weight that decays."""
    if group["weight_decay"]:
        lamb(self, group, p, state)
    else:
        p.sub_(group["lr"] * p.grad)
        state["exp_avg"] = torch.zeros_like(p)


def count(self: Updating, group: dict[str, Any], p: Any, state: dict[str, Any]) -> None:
    group["k"] = group.get("k", 0) + 1
    p.sub_(group["lr"] / group["k"] * p.grad)


def estimate(self: Updating, group: dict[str, Any], p: Any, state: dict[str, Any]) -> None:
    """Estimates its step size, one for a parameter."""
    state["d"] = state.get("d", 1.0) + p.grad.abs().max().item()
    p.sub_(group["lr"] * state["d"] * p.grad)


def center(self: Updating, group: dict[str, Any], p: Any, state: dict[str, Any]) -> None:
    """Elementwise on vectors; centers the gradients of matrices."""
    p.sub_(group["lr"] * (p.grad - p.grad.mean(1, keepdim=True) if p.dim() == 2 else p.grad))


def shuffle(self: Updating, group: dict[str, Any], p: Any, state: dict[str, Any]) -> None:
    p.sub_(group["lr"] * state.setdefault("noise", torch.rand_like(p)) * p.grad)


Lamb, Lars, Counting = updating("Lamb", lamb), updating("Lars", lars), updating("Counting", count)
Distance, Centered, Shuffled = (
    updating("Distance", estimate),
    updating("Centered", center),
    updating("Shuffled", shuffle),
)
FixedRate = updating("FixedRate", lambda self, group, p, state: p.sub_(self.built_lr * p.grad))
Noisy = updating("Noisy", lambda self, group, p, state: p.sub_(group["lr"] * (p.grad + torch.randn_like(p))))


class Hidden(torch.optim.AdamW):
    """Its signature has no weight decay."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)


@pytest.mark.parametrize(
    ("optimizer", "options", "reason"),
    [
        (torch.optim.Adafactor, {}, "is not elementwise.*weight of shape.*the states are variance and row_var, col"),
        (torch.optim.LBFGS, {}, "closure that computes the loss again"),
        (torch.optim.Muon, {}, "fails on 1-D FP32 tensors.*Muon only supports 2D parameters"),
        (torch.optim.SparseAdam, {}, "does not support dense gradients"),
        (torch.optim.ASGD, {}, "its state 'eta' is one number for a parameter, and depends on .* the learning rate"),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}, "first update differs from later ones.*set dampening=0"),
        (torch.optim.RAdam, {"betaz": (0.9, 0.99)}, "has no option betaz; did you mean 'betas'"),
        (torch.optim.RAdam, {"betas": (2.0, 3.0)}, r"betas=\[2,3\] it fails.*Invalid beta parameter at index 0"),
        (Lamb, {}, "is not elementwise: .* the masters differ. It needs whole tensors"),
        (Lars, {}, "is not elementwise: .* the masters differ"),
        (Centered, {}, r"is not elementwise: .*weight of shape \[128, 136\] .* the masters differ"),
        (Counting, {}, "keeps more than its states"),
        (FixedRate, {}, "reads lr or weight_decay when it is built, not from param_groups"),
        (Distance, {}, "is not elementwise: .*in two parts"),
        (Noisy, {}, "is not elementwise"),
        (Shuffled, {}, "its state 'noise' starts neither from one value nor from the masters"),
        (Hidden, {}, "its signature hides its weight_decay; give weight_decay="),
    ],
)
def test_others_are_refused_with_the_reason(optimizer: Any, options: dict[str, Any], reason: str) -> None:
    random_state = torch.get_rng_state()
    with pytest.raises(ConfigError, match=rf"TorchOptimizer cannot take {optimizer.__name__}: (?s:.*){reason}"):
        rule_of(TorchOptimizer(optimizer, lr=1e-4, **options))
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_class_with_free_options_is_taken_once_they_are_given() -> None:
    record = TorchOptimizer(Hidden, weight_decay=0.1)
    assert record.decay == 0.1
    assert record.without_decay().options == {"weight_decay": 0.0}
    assert [spec.name for spec in rule_of(record).states] == ["exp_avg", "exp_avg_sq"]
