"""The units of ``fully_shard``, and the parameters that are replicated."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dtrain.engine.adapters.fsdp2 import units as fsdp2_units
from dtrain.engine.adapters.fsdp2.units import UnitPlan, plan_units
from dtrain.parameters.groups import decayed_names, find_groups
from dtrain.precision.contract import resolve
from dtrain.precision.policy import PrecisionPolicy
from tests.helpers.zoo import make

BF16 = torch.bfloat16


def plan(model: nn.Module, precision: str = "bf16", in_fp32: tuple[str, ...] = ()) -> UnitPlan:
    contract = resolve(PrecisionPolicy.named(precision, rules=dict.fromkeys(in_fp32, "fp32")), model)
    return plan_units(model, find_groups(model), contract)


def names(found: UnitPlan) -> dict[str, list[str]]:
    return {unit.name: sorted(unit.parameters) for unit in found.units}


def test_every_parameter_is_in_one_unit_or_replicated() -> None:
    for name in ("transformer", "tied", "partly_frozen", "conv_batch_norm", "odd_sizes", "nested", "weight_norm"):
        model = make(name).build(0)
        for precision in ("fp32", "bf16"):
            found = plan(model, precision)
            placed = [other for unit in found.units for other in unit.parameters] + list(found.replicated)
            assert sorted(placed) == sorted(n for n, p in model.named_parameters() if p.requires_grad), name
            assert found.units[-1].module is model


def test_what_is_replicated() -> None:
    """Norms beside low-precision weights only, and parameters without dimensions or elements."""
    model = make("transformer").build(0)
    planned, in_fp32 = plan(model), plan(model, "fp32")
    assert {unit.dtype for unit in planned.units} == {BF16}
    assert {unit.dtype for unit in in_fp32.units} == {torch.float32}
    assert "blocks.0.ffn_norm.weight" in planned.replicated
    assert in_fp32.replicated == {}
    assert sorted(plan(make("odd_sizes").build(0), "fp32").replicated) == ["empty", "scale"]


def test_shared_parameters() -> None:
    """Those that units share are replicated, those of the model itself are sharded with it."""
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5)) for _ in range(2))
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 4), "blocks": blocks})
    blocks[1][0].weight, blocks[1][1].weight = blocks[0][0].weight, model["embedding"].weight
    found = plan(model)
    assert list(found.replicated) == ["blocks.0.0.weight"]
    assert "embedding.weight" in names(found)[""]
    assert "blocks.1.0.bias" in names(found)["blocks.1"]
    found = plan(make("tied").build(0))
    assert "embedding.weight" in names(found)[""]
    assert "head.weight" not in found.replicated


def test_large_fp32_modules_get_units_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp2_units, "LARGE_NUMEL", 100)
    model = make("transformer").build(0)
    found = plan(model, in_fp32=("blocks.0.ffn", "head", "blocks.1.out"))
    dtypes = dict.fromkeys(("blocks.0.ffn", "head"), torch.float32) | dict.fromkeys(("blocks.0", "blocks.1", ""), BF16)
    assert {unit.name: unit.dtype for unit in found.units} == dtypes
    assert "blocks.1.out.weight" in found.replicated, "72 elements"
    assert names(found)["blocks.0.ffn"] == [f"blocks.0.ffn.{n}" for n in ("0.bias", "0.weight", "2.bias", "2.weight")]


def test_units_without_a_forward_are_split_into_their_children() -> None:
    """``stages`` of the model holds ModuleLists, which are never called."""
    found = names(plan(make("nested").build(0), "fp32"))
    assert {"stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"} <= found.keys()
    assert "stages.0" not in found


def test_weight_decay_acts_on_matrices_outside_norms() -> None:
    norm = type("Norm2d", (nn.Module,), {})()
    norm.weight = nn.Parameter(torch.ones(2, 2))
    model = nn.Sequential(nn.Linear(2, 2), norm, nn.Linear(2, 2))
    model[2].requires_grad_(False)
    assert decayed_names(model) == {"0.weight"}
