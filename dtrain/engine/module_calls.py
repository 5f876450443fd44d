"""Forwards that code outside an engine calls on the model itself, as generation does."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import nn

from dtrain.parameters.guarded_reads import ParameterReads
from dtrain.precision.forward import Autocast
from dtrain.sharding.hooks import ModuleHook


class ModuleCalls:
    """Opens the weights in a forward of the model; if masters are shown, the forward also has the engine's precision.

    Args:
        model: gets hooks, which do nothing in a copy.
        reads: of its engine.
        autocast: the contract, as the engine's own forwards follow it.
    """

    def __init__(self, model: nn.Module, reads: ParameterReads, autocast: Autocast) -> None:
        self._reads, self._autocast = reads, autocast
        self._running: list[ExitStack | None] = []  # forwards; None: inside one, or inside a call of the engine
        model.register_forward_pre_hook(ModuleHook(self._enter), prepend=True)
        model.register_forward_hook(ModuleHook(self._leave), always_call=True)

    def end(self) -> None:
        """Ends forwards that something else than an ``Exception`` has left, such as ``KeyboardInterrupt``."""
        while self._running:
            if (stack := self._running.pop()) is not None:
                stack.close()

    def _enter(self, *_: Any) -> None:
        if self._reads.is_entered:
            self._running.append(None)
            return
        stack = ExitStack()
        stack.enter_context(self._reads)
        if self._reads.gives_masters:
            stack.enter_context(self._autocast())
        self._running.append(stack)

    def _leave(self, _: nn.Module, args: Any, output: Any) -> Any:
        stack = self._running.pop() if self._running else None  # empty: another hook failed before this forward began
        if stack is None:
            return None
        stack.close()
        return self._autocast.cast_output(output) if self._reads.gives_masters else None
