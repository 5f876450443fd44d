"""Weights that modules keep beside their parameters, under ``fully_shard``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dtrain
from dtrain.errors import ModelError
from dtrain.parameters.escapes import kept_tensors, storage_key, tensors_in
from tests.helpers.net import Net


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("keep", [lambda w: [w], lambda w: {"weight": w}, lambda w: ((w,),)])
def test_a_parameter_in_a_list_that_fully_shard_does_not_renew_is_refused(keep: Any, stage: int) -> None:
    """Forwards would read its first values for ever."""
    weight = nn.Parameter(torch.eye(3))
    keeping = Net(lambda net, x: x @ next(tensors_in(net.kept)), weight=weight, kept=keep(weight))
    model = nn.Sequential(keeping, nn.Linear(3, 1))
    with pytest.raises(ModelError, match=r"attribute '0.kept' keeps the parameter '0.weight'"):
        dtrain.initialize(model, engine="fsdp2", zero_stage=stage, precision="fp32", seed=0)


def test_what_is_found_in_outputs_and_attributes() -> None:
    weight = torch.ones(2)
    cycle: list[Any] = [weight]
    cycle.append(cycle)
    module = nn.GRU(2, 2)
    module.register_buffer("table", weight.view(2, 1))
    module.config = {"a": [1, "b", None], "module": torch, "function": len}
    assert list(tensors_in({"x": (weight, [None, "text", 3, module, nn.Module])})) == [weight]
    assert {id(tensor) for tensor in tensors_in(cycle)} == {id(weight)}
    assert {name: tensor for name, _, tensor in kept_tensors(module, "unit")}["unit.table"].shape == (2, 1)
    assert {name for name, *_ in kept_tensors(module)} == {
        *(name for name, _ in module.named_parameters()),
        *("_flat_weights", "table"),
    }
    assert storage_key(module.table) == storage_key(weight) != storage_key(torch.ones(2))
    assert storage_key(torch.eye(2).to_sparse()) is None
