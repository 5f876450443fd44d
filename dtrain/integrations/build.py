"""Builds the engine of a prepared model when its optimizer is prepared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dtrain.distributed.startup.setup import connect
from dtrain.engine.initialize import initialize
from dtrain.engine.release import Installation
from dtrain.errors import ConfigError
from dtrain.integrations.driver import EngineDriver
from dtrain.integrations.optimizers import record_of
from dtrain.integrations.prepared import PreparedModel

_PREPARED = "_dtrain_prepared"
"""Attribute of a module, which keeps its engine as long as the module, whoever prepared it."""


class _Prepared:
    """The driver of a module's engine, and what the engine has installed; a copy of the module has neither."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __deepcopy__(self, memo: Any) -> _Prepared:
        return _Prepared()

    def __reduce__(self) -> Any:
        return _Prepared, ()


def end_engine_of(module: nn.Module) -> None:
    """Ends the engine of ``module``, if it has one; the module keeps its weights; all ranks call."""
    held = vars(module).get(_PREPARED)
    if held is not None and held.parts:
        driver, installation = held.parts
        driver.leave(installation)
        vars(module).pop(_PREPARED, None)


def model_of(optimizer: torch.optim.Optimizer, models: Sequence[PreparedModel]) -> PreparedModel | None:
    """Returns the one of ``models`` that has the parameters of ``optimizer``, None if there is none.

    Raises:
        ConfigError: there are several, or it has an engine.
    """
    given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found = [model for model in models if given & {id(parameter) for parameter in model.parameters()}]
    if not found:
        return None
    if len(found) > 1:
        raise ConfigError(
            f"the {type(optimizer).__name__} has parameters of {len(found)} models; give one optimizer the parameters "
            f"of one model, and call accelerator.prepare(model, optimizer) with both"
        )
    if found[0].driver is not None:
        raise ConfigError(
            f"the {type(found[0].module).__name__} has an optimizer already; one optimizer with parameter groups "
            f"updates all parameters of a model"
        )
    return found[0]


def build(
    model: PreparedModel, optimizer: torch.optim.Optimizer, device: torch.device, options: Mapping[str, Any]
) -> EngineDriver:
    """Builds the engine of ``model`` and returns what runs it.

    Args:
        model: has no engine yet.
        optimizer: of all its trained parameters.
        device: of this rank, as accelerate names it.
        options: further arguments of ``dtrain.initialize``; an ``optimizer`` among them replaces the given one's
            update.

    Raises:
        ConfigError: an optimizer or an option that cannot be kept.
    """
    options = {"optimizer": record_of(optimizer, model.module), **options}
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    device = device if device.type == "cuda" else torch.device("cpu")  # accelerate numbers CPUs too
    installation = Installation(model.module)
    engine = initialize(model.module, comm=connect(device), **options)
    engine.guard_reads(shows_masters=True)
    installation.complete()
    # a library may have replaced the parameters, whose memory the optimizer would keep
    now = dict(model.module.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [now.get(names[id(parameter)], parameter) for parameter in group["params"]]
    optimizer.state.clear()  # of a class that makes its states when it is built
    model.driver = EngineDriver(engine, optimizer)
    vars(model.module)[_PREPARED] = _Prepared(model.driver, installation)
    return model.driver
