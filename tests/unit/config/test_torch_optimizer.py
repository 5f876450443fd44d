"""The record of an optimizer of torch: text and numbers, and the class that it was given."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from dtrain.config.optim import TorchOptimizer
from dtrain.errors import ConfigError


def test_the_record_is_text_and_numbers_and_keeps_the_class() -> None:
    class Local(torch.optim.RAdam):
        pass

    record = TorchOptimizer(Local, 0.1, weight_decay=0.2, groups={"*.bias": {"weight_decay": 0.0, "lr_factor": 2.0}})
    assert record.factory == f"{__name__}:test_the_record_is_text_and_numbers_and_keeps_the_class.<locals>.Local"
    assert json.loads(json.dumps(asdict(record)))["options"] == {"weight_decay": 0.2}
    for other in (replace(record, lr=0.2), record.with_changes("*.bias"), copy.deepcopy(record)):
        assert other.load() is Local
        assert other.factory == record.factory
    assert record.with_changes("*.bias").options == {"weight_decay": 0.0}
    assert record.with_changes("*.bias").groups == {}
    assert copy.deepcopy(record) == record
    assert replace(record, lr=0.2) != record


def test_a_class_by_name() -> None:
    named = TorchOptimizer("torch.optim:RAdam", 1e-3, options={"betas": [0.9, 0.99]})
    assert named == replace(TorchOptimizer(torch.optim.RAdam, betas=(0.9, 0.99)), factory="torch.optim:RAdam")
    assert named.load() is torch.optim.RAdam
    assert named.options == {"betas": (0.9, 0.99)}


def test_the_weight_decay_is_the_option_or_the_default_of_the_class() -> None:
    assert TorchOptimizer(torch.optim.AdamW).decay == 0.01
    assert TorchOptimizer(torch.optim.AdamW).without_decay().options == {"weight_decay": 0.0}
    assert TorchOptimizer("torch.optim:AdamW", weight_decay=0.3).decay == 0.3
    assert TorchOptimizer(torch.optim.Rprop).decay == 0.0
    assert TorchOptimizer(torch.optim.Rprop).without_decay() == TorchOptimizer(torch.optim.Rprop)


@dataclass
class NoOptimizer:
    lr: float = 0.1


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ([nn.Linear], {}, r"factory=the class torch.nn.modules.linear.Linear is not a class derived from torch.optim"),
        ([NoOptimizer()], {}, "TorchOptimizer.factory=.*NoOptimizer.* is not text"),
        (["RAdam"], {}, "factory=RAdam must be package.module:Class, such as torch.optim:RAdam"),
        ([torch.optim.RAdam], {"betas": torch.ones(2)}, "options=.* must be numbers, text, or lists of them"),
        ([torch.optim.RAdam, -1.0], {}, "TorchOptimizer.lr=-1.0 is too small"),
        ([torch.optim.RAdam], {"params": []}, "options sets params"),
        ([torch.optim.RAdam], {"groups": {"*": {"lr": 0.1}}}, "groups, '.': .*options sets lr; give .*lr_factor"),
        ([torch.optim.RAdam], {"groups": {"*": {"lr_factor": -1}}}, "lr_factor=-1 of '.' must be a finite number"),
    ],
)
def test_invalid_records_are_refused(arguments: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TorchOptimizer(*arguments, **options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torch.optim:RAdamm", "module torch.optim has no RAdamm; did you mean 'RAdam'"),
        ("nowhere.at.all:X", "no module named nowhere on the Python path"),
        ("torch.nn:Linear", "is not a class derived from torch.optim.Optimizer"),
    ],
)
def test_names_of_no_optimizer_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TorchOptimizer(name).load()
