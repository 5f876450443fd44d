"""``engine.step``: a clipping threshold and a factor of the gradient for one step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.errors import UsageError


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 4))


def engine_of(**options: Any) -> dtrain.Engine:
    options = {"precision": "fp32", "max_grad_norm": None, "seed": 0, **options}
    return dtrain.initialize(build(), optimizer=dtrain.SGD(0.1, momentum=0.0), **options)


def loss_of(engine: dtrain.Engine, shift: float = 0.0) -> Tensor:
    return (engine(torch.linspace(-1, 1, 12).view(2, 6)) - shift).square().mean()


def stepped(engine: dtrain.Engine, **arguments: Any) -> tuple[dict[str, Tensor], float]:
    engine.backward(loss_of(engine))
    outcome = engine.step(**arguments)
    return engine.master_state(), outcome.grad_norm


@pytest.mark.parametrize("engine", ["native", "ddp"])
def test_the_threshold_of_a_step_is_that_of_a_run_with_it(engine: str) -> None:
    clipped, norm = stepped(engine_of(engine=engine, max_grad_norm=0.05))
    assert norm > 0.05
    for default, given, want in ((None, 0.05, clipped), (3.0, 0.05, clipped), (0.05, None, clipped)):
        own = engine_of(engine=engine, max_grad_norm=default)
        got, same = stepped(own, max_grad_norm=given)
        assert same == norm
        assert all(torch.equal(got[name], value) for name, value in want.items())
    free, _ = stepped(engine_of(engine=engine))
    got, _ = stepped(engine_of(engine=engine, max_grad_norm=0.05), max_grad_norm=math.inf)
    assert all(torch.equal(got[name], value) for name, value in free.items())
    assert not all(torch.equal(clipped[name], value) for name, value in free.items())


def test_it_holds_for_one_step() -> None:
    engine, other = engine_of(max_grad_norm=0.05), engine_of(max_grad_norm=0.05)
    for arguments in ({"max_grad_norm": math.inf, "grad_factor": 1.0}, {}):
        got, _ = stepped(engine, **arguments)
    want, _ = stepped(other, max_grad_norm=math.inf)
    want, _ = stepped(other, max_grad_norm=0.05)
    assert all(torch.equal(got[name], value) for name, value in want.items())


def test_a_factor_adds_the_gradients_of_micro_batches() -> None:
    model = build()
    for shift in (0.0, 1.0, 2.0):
        (model(torch.linspace(-1, 1, 12).view(2, 6)) - shift).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    engine = engine_of()
    for shift in engine.accumulate([0.0, 1.0, 2.0]):
        engine.backward(loss_of(engine, shift))
    outcome = engine.step(max_grad_norm=0.5, grad_factor=3.0)
    assert outcome.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    for name, value in engine.master_state().items():
        torch.testing.assert_close(value, model.get_parameter(name).detach())


@pytest.mark.parametrize("name", ["max_grad_norm", "grad_factor"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, "1", True])
def test_values_that_are_refused(name: str, value: Any) -> None:
    engine = engine_of()
    engine.backward(loss_of(engine))
    with pytest.raises(UsageError, match=rf"engine\.step\({name}={value!r}\): expected a"):
        engine.step(**{name: value})
    assert engine.step().applied
