"""Guards and hooks on the modules of a model whose parameters are sharded (stage 3)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dtrain.sharding.group import ParameterGroup


class UnitParameters(dict[str, Any]):
    """Replacement of a module's ``_parameters``: ``self.weight`` is read only if its group may be."""

    def __init__(
        self,
        parameters: Mapping[str, Any],
        guards: Mapping[str, tuple[ParameterGroup, str]],
        require: Callable[[ParameterGroup, str], None],
    ) -> None:
        super().__init__(parameters)
        self._guards = guards
        self._require = require

    def __getitem__(self, key: str) -> Any:
        if torch.compiler.is_compiling():  # the hooks of a compiled block are outside its graph, and ran before
            return super().__getitem__(key)
        guard = self._guards.get(key)
        # repr() of a Linear reads its bias, to print whether there is one
        if guard is not None and not guard[0].may_be_read and sys._getframe(2).f_code.co_name != "extra_repr":
            self._require(*guard)
        return super().__getitem__(key)

    def unit(self, key: str) -> str:
        """Returns the name of the unit in whose forward a parameter may be read; empty: anywhere in the model's."""
        guard = self._guards.get(key)
        return guard[0].name if guard is not None else ""

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # a copy of the module belongs to no engine


def reads_attributes(module: nn.Module) -> bool:
    """Whether ``module`` runs a forward of torch's own that reads parameters as attributes; RNNs keep a list of them.

    ``UnitParameters`` then sees every read. A hook before the forward would take as long as a small operation.
    """
    defined_in = getattr(getattr(type(module), "forward", None), "__module__", "")
    is_torch = defined_in.startswith("torch.nn.modules.") and "forward" not in module.__dict__
    return is_torch and not isinstance(module, nn.RNNBase)


class ModuleHook:
    """A hook that does nothing in a copy of its module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleHook, (_nothing,)


def _nothing(*_: Any) -> None:
    pass
