"""The rule of each optimizer's record. An optimizer is added here: a frozen dataclass with ``lr``, and its rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from dtrain.config.optim import SGD, Adam, AdamW, AdamWBF16, Lion, TorchOptimizer
from dtrain.errors import ConfigError
from dtrain.optim.adamw import AdamRule, AdamWBF16Rule, AdamWRule
from dtrain.optim.lion import LionRule
from dtrain.optim.rule import Rule
from dtrain.optim.sgd import SGDRule
from dtrain.optim.torch_optimizer import TorchRule
from dtrain.precision.hardware import has_compiler

Record = TypeVar("Record")

RULES: dict[type, Callable[[Any], Rule]] = {
    AdamW: AdamWRule,
    AdamWBF16: AdamWBF16Rule,
    Adam: AdamRule,
    SGD: SGDRule,
    Lion: LionRule,
}
_CPU = torch.device("cpu")


def rule_of(record: object, device: torch.device = _CPU) -> Rule:
    """Returns the rule of an optimizer's hyper-parameters, decided for ``device``, that of the masters.

    Raises:
        ConfigError: no optimizer of dtrain has such a record.
    """
    if isinstance(record, TorchOptimizer):
        return TorchRule(record, device)
    make = RULES.get(type(record))
    if make is None:
        known = ", ".join(sorted(known.__name__ for known in RULES))
        raise ConfigError(f"optimizer is {type(record).__name__}; expected one of {known}")
    return make(record)


def on_device(record: Record, device: torch.device) -> Record:
    """Returns the hyper-parameters with ``compile``, if they have it, decided for ``device``.

    A CPU does not compile, which takes seconds and saves a fifth of the time of a fused kernel; without one (Lion,
    AdamW with BF16 moments) it saves three quarters.
    """
    if getattr(record, "compile", None) != "auto":
        return record
    return replace(record, compile=device.type == "cuda" and has_compiler(device))  # type: ignore[type-var]
