"""Parameter groups, their order in backward, and second names of tied parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from dtrain.errors import ConfigError
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


def linears(number: int) -> nn.ModuleList:
    return nn.ModuleList(linear() for _ in range(number))


def sharing(model: nn.Module, one: str, other: str) -> nn.Module:
    """Gives the module ``other`` the weight of ``one``."""
    model.get_submodule(other).weight = model.get_submodule(one).weight
    return model


def module_in_two_units() -> nn.Module:
    block = linear()
    return nn.ModuleList([block, linear(), block])


def empty_parameters() -> nn.Module:
    return nn.ParameterDict({"a": nn.Parameter(torch.empty(0)), "b": nn.Parameter(torch.empty(0, 3))})


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        # a Sequential itself
        (lambda: make("mlp").build(0), {name: [f"{name}.weight", f"{name}.bias"] for name in "024"}),
        (lambda: sharing(linears(3), "0", "2"), {"": ["0.weight"], "1": ["1.weight"]}),
        (
            lambda: sharing(nn.ModuleDict({"blocks": linears(2), "head": linear()}), "blocks.0", "head"),
            {"": ["blocks.0.weight"], "blocks.1": ["blocks.1.weight"]},
        ),
        (module_in_two_units, {"": ["0.weight"], "1": ["1.weight"]}),
        (
            lambda: sharing(nn.ModuleList([nn.Sequential(linear(), linear()), linear()]), "0.0", "0.1"),
            {"0": ["0.0.weight"], "1": ["1.weight"]},
        ),
        (lambda: linears(11), {f"{n}": [f"{n}.weight"] for n in range(11)}),  # similar names
        (empty_parameters, {"": ["a", "b"]}),  # they share nothing
    ],
)
def test_auto_groups_by_hand(build: Callable[[], nn.Module], expected: dict[str, list[str]]) -> None:
    assert names(build()) == expected


@pytest.mark.parametrize(
    ("model", "units", "of_root"),
    [
        # a Sequential inside an element of a list is no unit of its own
        ("transformer", ["blocks.0", "blocks.1"], ["embedding.weight", "norm.weight", "norm.bias", "head.weight"]),
        # the outermost container
        ("nested", ["stages.0", "stages.1"], ["gate", "heads.main.weight", "heads.main.bias", "heads.skip.weight"]),
        # frozen parameters are in no group
        ("partly_frozen", ["blocks.1"], ["norm.weight", "head.weight"]),
    ],
)
def test_auto_groups_of_the_zoo(model: str, units: list[str], of_root: list[str]) -> None:
    found = names(make(model).build(0))
    assert list(found) == ["", *units]
    assert found[""] == of_root
    assert all(name.startswith(f"{unit}.") for unit in units for name in found[unit])


def test_patterns() -> None:
    model = make("transformer").build(0)
    assert list(names(model, "blocks.*")) == ["", "blocks.0", "blocks.1"], "what matches inside a unit joins it"
    assert list(names(model, ["head", "blocks.1", "blocks.0.ffn"])) == ["", "blocks.0.ffn", "blocks.1", "head"]
    assert names(model, ["blocks"])["blocks"][0] == "blocks.0.attention_norm.weight"
    assert list(names(model, "*")) == ["embedding", "blocks", "norm", "head"]
    assert list(names(make("gru").build(0))) == [""], "without containers"
    with pytest.raises(ConfigError, match=r"'embeding' matches no module; did you mean 'embedding'\?"):
        find_groups(model, ["blocks.*", "embeding"])


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
