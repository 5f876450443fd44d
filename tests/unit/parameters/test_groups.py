"""Parameter groups, their order in backward, and second names of tied parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dtrain.errors import ConfigError, ModelError
from dtrain.parameters.groups import aliases, backward_names, backward_order, find_groups
from tests.helpers.zoo import ZOO, make


def names(model: nn.Module, groups: str | list[str] = "auto") -> dict[str, list[str]]:
    return {group.name: [name for name, _ in group.parameters] for group in find_groups(model, groups)}


def linear() -> nn.Linear:
    return nn.Linear(2, 2, bias=False)


@pytest.mark.parametrize("entry", ZOO.values(), ids=ZOO)
def test_every_trainable_parameter_is_in_one_group(entry: object) -> None:
    model = entry.build(0)  # type: ignore[attr-defined]
    groups = find_groups(model)
    found = [name for group in groups for name, _ in group.parameters]
    assert sorted(found) == sorted(name for name, p in model.named_parameters() if p.requires_grad)
    live = dict(model.named_parameters())
    assert all(p is live[name] for group in groups for name, p in group.parameters)
    assert all(group.parameters for group in groups), "no empty group"
    order = [group.name for group in groups]
    assert "" not in order[1:], "the root comes first"
    modules = [name for name, _ in model.named_modules()]
    assert order == sorted(order, key=modules.index), "units in definition order"


def test_auto_takes_the_elements_of_lists_and_sequentials() -> None:
    found = names(make("transformer").build(0))
    assert list(found) == ["", "blocks.0", "blocks.1"]
    assert found[""] == ["embedding.weight", "norm.weight", "norm.bias", "head.weight"]
    assert all(name.startswith("blocks.1.") for name in found["blocks.1"])
    assert "blocks.1.ffn.0.weight" in found["blocks.1"], "a Sequential inside an element is no unit of its own"


def test_auto_on_a_sequential_itself() -> None:
    assert names(make("mlp").build(0)) == {
        "0": ["0.weight", "0.bias"],
        "2": ["2.weight", "2.bias"],
        "4": ["4.weight", "4.bias"],
    }


def test_auto_stops_at_the_outermost_container() -> None:
    found = names(make("nested").build(0))
    assert list(found) == ["", "stages.0", "stages.1"]
    assert found[""] == ["gate", "heads.main.weight", "heads.main.bias", "heads.skip.weight"]


def test_auto_without_containers_is_one_group() -> None:
    assert list(names(make("gru").build(0))) == [""]


def test_parameter_shared_by_two_units_is_in_the_root_group() -> None:
    model = nn.ModuleList([linear(), linear(), linear()])
    model[2].weight = model[0].weight
    assert names(model) == {"": ["0.weight"], "1": ["1.weight"]}


def test_parameter_shared_with_the_rest_is_in_the_root_group() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([linear(), linear()])
    model.head = linear()
    model.head.weight = model.blocks[0].weight
    assert names(model) == {"": ["blocks.0.weight"], "blocks.1": ["blocks.1.weight"]}


def test_module_in_two_units_is_in_the_root_group() -> None:
    block = linear()
    assert names(nn.ModuleList([block, linear(), block])) == {"": ["0.weight"], "1": ["1.weight"]}


def test_tied_parameters_inside_one_unit_stay_in_its_group() -> None:
    model = nn.ModuleList([nn.Sequential(linear(), linear()), linear()])
    model[0][1].weight = model[0][0].weight
    assert names(model) == {"0": ["0.0.weight"], "1": ["1.weight"]}


def test_units_with_similar_names_keep_their_own() -> None:
    found = names(nn.ModuleList(linear() for _ in range(11)))
    assert found["1"] == ["1.weight"]
    assert found["10"] == ["10.weight"]


def test_frozen_parameters_are_in_no_group() -> None:
    model = make("partly_frozen").build(0)
    found = names(model)
    assert list(found) == ["", "blocks.1"]
    assert found[""] == ["norm.weight", "head.weight"]


def test_patterns() -> None:
    model = make("transformer").build(0)
    assert list(names(model, "blocks.*")) == ["", "blocks.0", "blocks.1"], "what matches inside a unit joins it"
    assert list(names(model, ["head", "blocks.1", "blocks.0.ffn"])) == ["", "blocks.0.ffn", "blocks.1", "head"]
    assert names(model, ["blocks"])["blocks"][0] == "blocks.0.attention_norm.weight"
    assert list(names(model, "*")) == ["embedding", "blocks", "norm", "head"]


def test_a_pattern_without_a_match_names_the_nearest_module() -> None:
    model = make("transformer").build(0)
    with pytest.raises(ConfigError, match=r"'embeding' matches no module; did you mean 'embedding'\?"):
        find_groups(model, ["blocks.*", "embeding"])


def test_two_parameters_over_one_storage_are_refused() -> None:
    model = nn.ModuleDict({"a": linear(), "b": linear()})
    model["b"].weight = nn.Parameter(model["a"].weight.detach())
    with pytest.raises(ModelError, match=r"'a\.weight' and 'b\.weight' are two parameters over one storage"):
        find_groups(model)


def test_empty_parameters_share_nothing() -> None:
    model = nn.ParameterDict({"a": nn.Parameter(torch.empty(0)), "b": nn.Parameter(torch.empty(0, 3))})
    assert names(model) == {"": ["a", "b"]}


def test_aliases_map_to_the_stored_name() -> None:
    assert aliases(make("tied").build(0)) == {"head.weight": "embedding.weight"}
    assert aliases(make("mlp").build(0)) == {}
    block = nn.Linear(2, 2)
    assert aliases(nn.ModuleList([block, nn.Linear(2, 2), block])) == {"2.weight": "0.weight", "2.bias": "0.bias"}


def test_backward_order_is_reverse_definition_with_the_root_group_last() -> None:
    model = nn.Sequential(nn.Linear(2, 2), linear())
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    groups = find_groups(model)
    assert [groups[index].name for index in backward_order(groups)] == ["1", "0", ""]
    assert backward_names(groups) == ["1.weight", "0.bias", "0.weight", "scale"]
