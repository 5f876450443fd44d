from __future__ import annotations

import copy
import json
from dataclasses import asdict, replace

import torch

from dtrain.config.optim import TorchOptimizer


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
    assert copy.deepcopy(record) == record != replace(record, lr=0.2)
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
