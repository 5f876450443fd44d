"""An optimizer of torch becomes the record of the same update, or is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dtrain
from dtrain.config.optim import Optimizer
from dtrain.errors import ConfigError, UsageError
from dtrain.integrations.optimizers import GroupRates, record_of
from tests.helpers.accelerate_loops import build, decay_groups, samples

Make = Callable[[nn.Module], torch.optim.Optimizer]


def three_groups(model: nn.Module) -> list[dict[str, Any]]:
    first, *others, last = list(model.parameters())
    return [{"params": [first], "lr": 1e-3}, {"params": others, "weight_decay": 0.05}, {"params": [last], "lr": 5e-2}]


MAKERS: list[tuple[type[Optimizer], Make]] = [
    (dtrain.AdamW, lambda m: torch.optim.AdamW(m.parameters(), 1e-2, weight_decay=0.2, betas=(0.8, 0.97), eps=1e-6)),
    (dtrain.AdamW, lambda m: torch.optim.AdamW(decay_groups(m), 1e-2, fused=True)),
    (dtrain.AdamW, lambda m: torch.optim.AdamW([{"params": list(m.parameters())[:1], "betas": (0.5, 0.9)},
                                                {"params": list(m.parameters())[1:]}], torch.tensor(1e-2))),
    (dtrain.AdamW, lambda m: torch.optim.Adam(m.parameters(), 1e-2, weight_decay=0.2, decoupled_weight_decay=True)),
    (dtrain.Adam, lambda m: torch.optim.Adam(three_groups(m), 1e-2, weight_decay=0.2)),
    (dtrain.SGD, lambda m: torch.optim.SGD(three_groups(m), 1e-2, momentum=0.9, nesterov=True, weight_decay=0.1)),
    (dtrain.TorchOptimizer, lambda m: torch.optim.SGD(m.parameters(), 1e-2, momentum=0.9, maximize=True)),
    (dtrain.TorchOptimizer, lambda m: torch.optim.AdamW(decay_groups(m), 1e-2, amsgrad=True)),
    (dtrain.TorchOptimizer, lambda m: torch.optim.RMSprop(three_groups(m), 1e-2, momentum=0.9)),
    (dtrain.TorchOptimizer, lambda m: torch.optim.SGD([{"params": list(m.parameters())[:2], "nesterov": True},
                                                       {"params": list(m.parameters())[2:]}], 1e-2, momentum=0.9)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "make"), MAKERS)
def test_the_record_updates_as_the_optimizer_does(kind: type[Optimizer], make: Make) -> None:
    model, reference = build(), build()
    optimizer, ours = make(reference), make(model)
    record, rates = record_of(ours, model), GroupRates(ours)
    assert type(record) is kind
    engine = dtrain.initialize(model, optimizer=record, precision="fp32", max_grad_norm=None)
    for x, y in samples(6):
        engine.backward(nn.functional.cross_entropy(engine(x[None]), y[None]))
        engine.step(lr=rates.current())
        optimizer.zero_grad()
        nn.functional.cross_entropy(reference(x[None]), y[None]).backward()
        optimizer.step()
        for group in ours.param_groups + optimizer.param_groups:
            group["lr"] = group["lr"] * 0.9
    for name, value in engine.master_state().items():
        torch.testing.assert_close(value, reference.get_parameter(name).detach(), rtol=2e-5, atol=1e-6)


def test_names_are_listed_only_where_they_differ() -> None:
    model = build()
    no_decay = decay_groups(model)[1]["params"]
    others = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    assert record_of(torch.optim.AdamW(groups, 1e-3), model) == dtrain.AdamW(1e-3, betas=(0.9, 0.999), weight_decay=0.1)
    odd = nn.ModuleDict({"a[0]*": nn.Linear(2, 2), "a0": nn.Linear(2, 2)})
    made = record_of(torch.optim.SGD([{"params": odd["a[0]*"].parameters(), "lr": 2.0},
                                      {"params": odd["a0"].parameters()}], 1.0), odd)  # fmt: skip
    engine = dtrain.initialize(odd, optimizer=made, precision="fp32")
    factors = {
        name: engine.states.plan.classes[number].lr_factor for name, number in engine.states.plan.numbers.items()
    }
    assert factors == {"a[0]*.weight": 1.0, "a[0]*.bias": 1.0, "a0.weight": 0.5, "a0.bias": 0.5}


def test_the_learning_rate_is_the_first_one_of_a_schedule_that_begins_at_zero() -> None:
    model = build()
    optimizer = torch.optim.AdamW(decay_groups(model), lr=1e-2)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    record = record_of(optimizer, model)
    assert record.lr == 1e-2
    assert {changes["lr_factor"] for changes in record.groups.values()} == {0.4}
    assert GroupRates(optimizer).current() == 0.0


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    return optimizer


def hooked(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("message", "make"),
    [
        ("the AdamW has taken steps", stepped),
        ("the AdamW has a step hook", hooked),
        ("SGD(differentiable=True) cannot be kept", lambda m: torch.optim.SGD(m.parameters(), differentiable=True)),
        ("parameter '3.bias' of the Sequential is in no group", lambda m: torch.optim.SGD(list(m.parameters())[:-1])),
        ("has a parameter that is not in", lambda m: torch.optim.SGD([*m.parameters(), nn.Parameter(torch.ones(1))])),
    ],
)
def test_refusals(message: str, make: Make) -> None:
    model = build()
    with pytest.raises(ConfigError, match=re.escape(message)):
        record_of(make(model), model)


def test_what_the_update_cannot_follow_is_refused() -> None:
    model = build()
    optimizer = torch.optim.AdamW(decay_groups(model), lr=1e-2)
    rates = GroupRates(optimizer)
    optimizer.param_groups[1]["lr"] = 1e-2
    with pytest.raises(UsageError, match=r"learning rate of parameter group 1 is 0\.01, 0\.4 times 0\.01 was expected"):
        rates.current()
    optimizer.param_groups[1]["lr"] = 4e-3
    torch.optim.lr_scheduler.OneCycleLR(optimizer, [2e-2, 8e-3], total_steps=10)
    with pytest.raises(UsageError, match="betas of parameter group 0 changed after"):
        rates.current()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(UsageError, match="has 3 parameter groups and had 2"):
        rates.current()
