"""Takes an engine off its model: the modules become plain again, and their parameters are the whole FP32 masters.

What an engine installs in modules (classes, forwards, hooks, attributes) is found by a comparison of the modules before
and after it was built. Hooks and attributes that the user adds later stay, and so do buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed._composable_state import _module_state_mapping

from dtrain.engine.interface import Engine
from dtrain.engine.request import manage
from dtrain.errors import ModelError

_STATES = ("_parameters", "_buffers", "_modules", "training")
"""Attributes of a module that are not what an engine installs."""

_RENEWED = "_dtrain_renewed"
"""Attribute of the parameter of an engine that has ended: the one that has its place now."""

_Hooks = dict[str, set[int]]


class Installation:
    """What an engine has changed in the modules of a model, beside their parameters.

    Args:
        model: before an engine is built for it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before = [(module, type(module), dict(vars(module)), _hooks(module)) for module in model.modules()]
        self._undo: list[tuple[nn.Module, type, dict[str, Any], list[str], _Hooks]] = []

    def complete(self) -> None:
        """Notes the changes, now that the engine is built."""
        for module, kind, attributes, hooks in self._before:
            now = vars(module)
            changed = {key: old for key, old in attributes.items() if now.get(key) is not old and key not in _STATES}
            added = [key for key in now if key not in attributes]
            new_hooks = {key: ids - hooks.get(key, set()) for key, ids in _hooks(module).items()}
            self._undo.append((module, kind, changed, added, new_hooks))
        self._before = []

    def undo(self) -> None:
        """Gives the modules back what they had."""
        for module, kind, changed, added, hooks in self._undo:
            for key, ids in hooks.items():
                for number in ids:
                    vars(module)[key].pop(number, None)
            for key in added:
                vars(module).pop(key, None)
            vars(module).update(changed)
            module.__class__ = kind
            _module_state_mapping.pop(module, None)  # of fully_shard, which shards a module once


def release(engine: Engine, installation: Installation) -> None:
    """Ends ``engine``, whose methods raise from then on, and gives the model new parameters; all ranks call.

    Raises:
        ModelError: the library below cannot be taken off.
        UsageError: as :meth:`dtrain.Engine.modify_weights`.
    """
    model = engine.module
    if engine.name == "deepspeed":
        raise ModelError(
            "this model is under an engine of DeepSpeed, which cannot be taken off a model; build a new model, and "
            "load the weights of accelerator.get_state_dict or engine.master_state into it"
        )
    with engine.modify_weights():
        values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    new = {id(old): nn.Parameter(values[name], old.requires_grad) for name, old in model.named_parameters()}
    parameters = [(module, dict(module._parameters.items())) for module in model.modules()]
    engine._between.end()
    installation.undo()
    for module, held in parameters:
        for old in held.values():
            if old is not None:
                setattr(old, _RENEWED, new[id(old)])
        vars(module)["_parameters"] = {key: p if p is None else new[id(p)] for key, p in held.items()}
    manage(model, is_managed=False)


def current(parameter: Tensor) -> Tensor:
    """Returns the parameter in the place of one that an engine had, of which an optimizer may have been made."""
    while hasattr(parameter, _RENEWED):
        parameter = getattr(parameter, _RENEWED)
    return parameter


def _hooks(module: nn.Module) -> _Hooks:
    return {key: set(value) for key, value in vars(module).items() if "hooks" in key and isinstance(value, Mapping)}
