"""Mistakes that would train the wrong thing without a word, each found at the next call."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.engine.native import NativeEngine
from dtrain.errors import ContractError, ModelError, UsageError


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x))


def engine_on(model: nn.Module) -> NativeEngine:
    engine = dtrain.initialize(model, precision="fp32", seed=0)
    assert isinstance(engine, NativeEngine)
    return engine


def one_step(engine: NativeEngine) -> dtrain.StepOutcome:
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    return engine.step()


def test_two_forwards_of_one_micro_batch_draw_different_masks() -> None:
    engine = engine_on(Noisy())
    x = torch.ones(4, 8)
    first, second = engine(x), engine(x)
    assert not torch.equal(first == 0, second == 0), "two views of one sample must not share their dropout"
    again = engine_on(_same_weights(engine.module))
    assert torch.equal(first, again(x)), "the first forward draws the same in every run"
    assert torch.equal(second, again(x))


def _same_weights(model: nn.Module) -> nn.Module:
    copy = Noisy()
    copy.load_state_dict(model.state_dict())
    return copy


def test_a_loss_without_a_graph_is_refused() -> None:
    engine = engine_on(Noisy())
    loss = engine(torch.ones(2, 8)).square().mean()
    with pytest.raises(UsageError, match="the loss has no graph"):
        engine.backward(loss.detach())
    engine.backward(loss.detach(), weight=0)
    assert engine.step().reason == "empty"


def test_a_parameter_unfrozen_later_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    engine = engine_on(model)
    assert one_step(engine).applied
    model[0].requires_grad_(True)
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    with pytest.raises(ContractError, match=r"'0\.weight' was frozen at dtrain.initialize and now requires a gradient"):
        engine.step()


def test_a_parameter_frozen_later_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    engine = engine_on(model)
    model[1].bias.requires_grad_(False)
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    with pytest.raises(ContractError, match=r"'1\.bias' was frozen after dtrain.initialize"):
        engine.step()


def test_one_model_has_one_engine() -> None:
    model = nn.Linear(8, 8)
    engine_on(model)
    with pytest.raises(ModelError, match="under an engine already"):
        engine_on(model)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_weights_that_cannot_weigh_are_refused(weight: float, as_tensor: bool) -> None:
    engine = engine_on(nn.Linear(8, 8))
    before = engine.state.master.clone()

    def step() -> None:
        loss = engine(torch.ones(2, 8)).square().mean()
        engine.backward(loss, weight=torch.tensor(weight) if as_tensor else weight)
        engine.step()

    with pytest.raises(UsageError, match=r"the weight of micro-batch 0 is .*; expected a finite number >= 0"):
        step()
    assert torch.equal(before, engine.state.master)


def test_a_replica_replaced_is_noticed_before_the_update() -> None:
    engine = engine_on(nn.Linear(8, 8))
    before = engine.state.master.clone()
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.module.weight.data = engine.module.weight.data.clone()  # type: ignore[union-attr]
    with pytest.raises(ContractError, match="no longer lies in its flat buffer"):
        engine.step()
    assert torch.equal(before, engine.state.master)


def test_the_culprit_names_the_micro_batch_that_was_meant() -> None:
    engine = engine_on(nn.Linear(8, 8))
    for number in engine.accumulate(range(4)):
        if number == 1:
            continue  # left out by the caller: no backward
        loss = engine(torch.ones(2, 8)).square().mean()
        engine.backward(loss * (math.inf if number == 2 else 1.0))
    outcome = engine.step()
    assert outcome.culprit is not None
    assert outcome.culprit.micro_batch == 2


def test_parameters_that_overlap_in_memory_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    both = torch.randn(12, 8)
    model[0].weight = nn.Parameter(both[:8])
    model[1].weight = nn.Parameter(both[4:], requires_grad=False)
    with pytest.raises(ModelError, match="two parameters over one storage"):
        engine_on(model)
