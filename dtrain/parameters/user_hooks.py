"""Hooks of the user on gradients, which run before an engine takes the gradient."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

Hooks = dict[int, Callable[[Any], Any]]

AFTER_ACCUMULATION = "_post_accumulate_grad_hooks"
"""Attribute of a tensor that ``register_post_accumulate_grad_hook`` fills, and that C++ reads in each backward."""


class _OwnLast(OrderedDict[int, Callable[[Any], Any]]):
    """The post-accumulate hooks of a parameter: those that are added after the engine's own still run before it."""

    own = -1  # key of the engine's

    def __setitem__(self, key: int, hook: Callable[[Any], Any]) -> None:
        last = self.pop(self.own, None)  # a dictionary is in the order of insertion
        super().__setitem__(key, hook)
        if last is not None:
            super().__setitem__(self.own, last)


def hook_last(parameter: nn.Parameter, hook: Callable[[Any], None]) -> None:
    """Adds the post-accumulate hook of an engine, which runs after those of the user that are added later, too."""
    hooks = getattr(parameter, AFTER_ACCUMULATION)
    if not isinstance(hooks, _OwnLast):
        before, hooks = hooks, _OwnLast()
        if before:
            # the dictionary itself, from which the handles of the user's hooks remove them; under one of their keys,
            # because it is no hook of the engine's
            hooks[next(iter(before))] = partial(call_after_accumulation, before)
        setattr(parameter, AFTER_ACCUMULATION, hooks)
    hooks.own = parameter.register_post_accumulate_grad_hook(hook).id


def call_after_accumulation(hooks: Hooks, parameter: Tensor) -> None:
    """Calls post-accumulate hooks in their order."""
    for hook in list(hooks.values()):
        hook(parameter)
