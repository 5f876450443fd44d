"""What the modules of a model return in one step, and the gradients of that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import partial

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dtrain.errors import ConfigError, nearest
from dtrain.precision.module_calls import ModuleCall, watch_calls
from dtrain.precision.policy import TRAINABLE_DTYPES
from dtrain.precision.rules import modules_without_hooks

OnTensor = Callable[[str, Tensor], None]
"""Called with the name of a module, and a tensor."""


def on_outputs(
    modules: Mapping[str, nn.Module], gradient: OnTensor, forward: OnTensor = lambda name, x: None
) -> ExitStack:
    """Calls ``forward`` with each floating tensor that one of ``modules`` returns, and ``gradient`` with its gradient.

    A forward that activation checkpointing repeats in backward gives its outputs once.
    """

    def end(call: ModuleCall) -> None:
        for value in pytree.tree_leaves(call.output):
            if not isinstance(value, Tensor) or value.dtype not in TRAINABLE_DTYPES:
                continue
            if not call.is_repeated:
                forward(call.name, value.detach())
            if value.requires_grad:
                value.register_hook(partial(gradient, call.name))

    return watch_calls(modules, end=end, repeats=True)


def hookable_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules of ``model`` by name, except those in compiled code, which runs without hooks."""
    without = modules_without_hooks(model)
    return {name: module for name, module in model.named_modules() if id(module) not in without}


def matching_modules(model: nn.Module, patterns: Sequence[str], key: str) -> dict[str, nn.Module]:
    """Returns the modules whose name matches one of ``patterns`` (``fnmatch``), by name.

    Raises:
        ConfigError: a pattern matches no module on which a hook works; ``key`` names the setting.
    """
    hookable = hookable_modules(model)
    for pattern in patterns:
        if any(fnmatchcase(name, pattern) for name in hookable):
            continue
        names = [name for name, _ in model.named_modules()]
        if any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"{key}: '{pattern}' matches only modules in compiled code, which runs without hooks")
        raise ConfigError(f"{key}: '{pattern}' matches no module of the model{nearest(pattern, filter(None, names))}")
    matches = {name: any(fnmatchcase(name, pattern) for pattern in patterns) for name in hookable}
    return {name: module for name, module in hookable.items() if matches[name]}
