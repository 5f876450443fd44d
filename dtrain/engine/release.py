"""Takes an engine off its model: the modules become plain again, and their parameters are the whole FP32 masters.

What an engine installs in modules and parameters (classes, forwards, hooks, attributes) is found by a comparison before
and after it was built. What the user sets later stays, and so do buffers.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed._composable_state import _module_state_mapping

from dtrain.engine.interface import Engine
from dtrain.engine.request import manage
from dtrain.errors import ModelError
from dtrain.parameters.user_hooks import AFTER_ACCUMULATION

_STATES = ("_parameters", "_buffers", "_modules", "training")
"""Attributes of a module that are not what an engine installs."""

_RENEWED = "_dtrain_renewed"
"""Attribute of a tensor that a library had put in the place of a parameter: that parameter."""

_ABSENT = object()


class Installation:
    """What an engine has changed in a model, beside the values of its parameters.

    Args:
        model: before an engine is built for it.

    Attributes:
        parameters: of the model by name, before a library replaces them.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = dict(model.named_parameters())
        owners = (*model.modules(), *self.parameters.values())
        self._before = [(one, type(one), _attributes(one), _hook_numbers(one)) for one in owners]
        self._changes: list[_Changes] = []

    def complete(self) -> None:
        """Notes the changes, now that the engine is built."""
        for owner, kind, old, hooks in self._before:
            new = _attributes(owner)
            pairs = {key: (old.get(key, _ABSENT), new.get(key, _ABSENT)) for key in old.keys() | new.keys()}
            changed = {key: pair for key, pair in pairs.items() if pair[0] is not pair[1]}
            added = {key: numbers - hooks.get(key, set()) for key, numbers in _hook_numbers(owner).items()}
            self._changes.append(_Changes(owner, (kind, type(owner)), changed, added))
        self._before = []

    def undo(self) -> None:
        """Gives modules and parameters back what they had, but for what the user has changed since."""
        for owner, kinds, attributes, hooks in self._changes:
            for key, numbers in hooks.items():
                for number in numbers:
                    _hooks(owner).get(key, {}).pop(number, None)
            held = vars(owner)
            for key, (old, new) in attributes.items():
                if held.get(key, _ABSENT) is new:
                    held[key] = old
                    if old is _ABSENT:
                        del held[key]
            if type(owner) is kinds[1]:
                owner.__class__ = kinds[0]
            _module_state_mapping.pop(owner, None)  # of fully_shard, which shards a module once


class _Changes(NamedTuple):
    """What an engine has changed in a module or a parameter.

    Attributes:
        owner: the module or parameter.
        kinds: its classes before and after.
        attributes: values before and after, by name.
        hooks: numbers of those that the engine has added, by the names of the attributes that hold them.
    """

    owner: Any
    kinds: tuple[type, type]
    attributes: dict[str, tuple[Any, Any]]
    hooks: dict[str, set[int]]


def release(engine: Engine, installation: Installation) -> None:
    """Ends ``engine``, whose methods raise from then on, and gives the model its own parameters, whole; all ranks call.

    Raises:
        ModelError: the library below cannot be taken off.
        UsageError: as ``dtrain.Engine.modify_weights``.
    """
    model = engine.module
    if engine.name == "deepspeed":
        raise ModelError(
            "this model is under an engine of DeepSpeed, which cannot be taken off a model; build a new model, and "
            "load the weights of accelerator.get_state_dict or engine.master_state into it"
        )
    with engine.modify_weights():
        values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    own = installation.parameters
    shown, unsharded = dict(model.named_parameters()), engine.states.unsharded_parameters()
    places = [(module, dict(module._parameters.items())) for module in model.modules()]
    engine._between.end()
    replaced = [(old, own[name]) for one in (unsharded, shown) for name, old in one.items() if old is not own[name]]
    for old, parameter in replaced:
        # what the user has set meanwhile, and not torch's mark of a parameter that is a DTensor
        vars(parameter).update((key, value) for key, value in vars(old).items() if key != "_is_param")
        setattr(old, _RENEWED, parameter)
    installation.undo()
    for name, old in shown.items():
        parameter = own[name]
        parameter.grad = None
        parameter.data = values[name]
        parameter.requires_grad_(old.requires_grad)
    for module, held in places:
        vars(module)["_parameters"] = {key: p if p is None else current(p) for key, p in held.items()}
    manage(model, is_managed=False)


def current(parameter: Tensor) -> Tensor:
    """Returns the parameter itself; of a tensor that a library had put in its place, the parameter."""
    return getattr(parameter, _RENEWED, parameter)


def _attributes(owner: Any) -> dict[str, Any]:
    return {key: value for key, value in vars(owner).items() if key not in _STATES}


def _hook_numbers(owner: Any) -> dict[str, set[int]]:
    return {key: set(hooks) for key, hooks in _hooks(owner).items()}


def _hooks(owner: Any) -> dict[str, MutableMapping[int, Any]]:
    """Returns the hooks of a module or a parameter, by the names of its attributes."""
    if isinstance(owner, nn.Module):
        found = {key: value for key, value in vars(owner).items() if "hooks" in key}
    else:
        found = {key: getattr(owner, key) for key in ("_backward_hooks", AFTER_ACCUMULATION)}
    return {key: value for key, value in found.items() if isinstance(value, MutableMapping)}
