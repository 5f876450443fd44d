"""Watches the calls of modules in a forward: what each one takes and returns, and which module's forward called it.

Hooks change no tensor, so the numbers of a forward and its backward stay the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn


@dataclass(eq=False)
class ModuleCall:
    """One call of a module.

    Attributes:
        name: path of the module; empty for the model itself.
        module: what is called.
        caller: path of the watched module whose forward called it; None for the first.
        args, kwargs: what it takes.
        output: what it returned; None until it ends.
        begun: what ``begin`` has returned for this call.
        is_repeated: whether activation checkpointing repeats the call in backward; then the two above are unknown.
    """

    name: str
    module: nn.Module
    caller: str | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    begun: Any = None
    is_repeated: bool = False


class _Watch:
    def __init__(self, begin: Callable[[ModuleCall], Any], end: Callable[[ModuleCall], None], repeats: bool) -> None:
        self._begin, self._end, self._repeats = begin, end, repeats
        self._running: list[ModuleCall] = []

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if in_backward():
            return
        call = ModuleCall(name, module, self._running[-1].name if self._running else None, args, kwargs)
        call.begun = self._begin(call)
        self._running.append(call)

    def leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if in_backward():
            if self._repeats:
                self._end(ModuleCall(name, module, None, args, kwargs, output, is_repeated=True))
            return
        while self._running:
            call = self._running.pop()
            if call.module is module:  # others were left by an exception
                call.output = output
                self._end(call)
                return


def watch_calls(
    modules: Mapping[str, nn.Module],
    begin: Callable[[ModuleCall], Any] = lambda call: None,
    end: Callable[[ModuleCall], None] = lambda call: None,
    *,
    repeats: bool = False,
    before_hooks: bool = False,
) -> ExitStack:
    """Calls ``begin`` and ``end`` for each call of ``modules``, given by path, until the returned context ends.

    A module that ``nn.Module.compile`` compiled is watched as a whole: no hook runs inside of it.

    Args:
        modules: to watch.
        begin: called after all hooks before the forward, such as the one with which a library unshards the parameters.
        end: called when the module has returned.
        repeats: whether ``end`` is called for repeated calls too.
        before_hooks: whether ``end`` is called before other hooks, such as one that reshards the parameters.
    """
    stack, watch = ExitStack(), _Watch(begin, end, repeats)
    for name, module in modules.items():
        if module._compiled_call_impl is not None:  # it would compile hooks, so it is wrapped instead
            stack.callback(setattr, module, "_compiled_call_impl", module._compiled_call_impl)
            module._compiled_call_impl = partial(_watched, watch, name, module, module._compiled_call_impl)
            continue
        leave = partial(watch.leave, name)
        for handle in (
            module.register_forward_pre_hook(partial(watch.enter, name), with_kwargs=True),
            module.register_forward_hook(leave, with_kwargs=True, prepend=before_hooks),
        ):
            stack.callback(handle.remove)
    return stack


def _watched(watch: _Watch, name: str, module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    watch.enter(name, module, args, kwargs)
    output = call(*args, **kwargs)
    watch.leave(name, module, args, kwargs, output)
    return output


def in_backward() -> bool:
    """Whether autograd runs in this thread, so that a forward is one that activation checkpointing repeats."""
    return bool(torch._C._current_graph_task_id() != -1)  # private, but torch.utils.checkpoint depends on it
