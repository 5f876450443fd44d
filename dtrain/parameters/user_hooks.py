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


def keep_last(parameter: nn.Parameter) -> None:
    """Lets the post-accumulate hooks that the parameter has now run after all that are added later."""
    hooks, now = _OwnLast(), getattr(parameter, AFTER_ACCUMULATION)
    setattr(parameter, AFTER_ACCUMULATION, hooks)
    # of several the dictionary itself, from which the handles of the user's hooks remove them
    last = next(iter(now.values())) if len(now) == 1 else partial(call_after_accumulation, now)
    hooks.own = parameter.register_post_accumulate_grad_hook(last).id


def call_after_accumulation(hooks: Hooks, parameter: Tensor) -> None:
    for hook in list(hooks.values()):
        hook(parameter)


def call_on_gradient(hooks: Hooks, grad: Tensor) -> Tensor:
    """Calls hooks of ``Tensor.register_hook``; returns what they make of ``grad``."""
    for hook in list(hooks.values()):
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad
