"""Forwards that code outside an engine calls on the model itself, as generation does."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import nn

from dtrain.parameters.guarded_reads import ParameterReads
from dtrain.precision.forward import Autocast
from dtrain.sharding.hooks import ModuleHook


class ModuleCalls:
    """Opens the weights in a forward of the model; if masters are shown, the forward also follows the contract.

    Args:
        model: gets hooks, which do nothing in a copy.
        reads: of its engine.
        autocast: the contract, as the engine's own forwards follow it.
    """

    def __init__(self, model: nn.Module, reads: ParameterReads, autocast: Autocast) -> None:
        self._reads, self._autocast = reads, autocast
        self._running: list[tuple[ExitStack, bool]] = []
        model.register_forward_pre_hook(ModuleHook(self._enter), prepend=True)
        model.register_forward_hook(ModuleHook(self._leave), always_call=True)

    def _enter(self, *_: Any) -> None:
        stack, is_outside = ExitStack(), self._reads.gives_masters and not self._reads.is_entered
        stack.enter_context(self._reads)
        if is_outside:
            stack.enter_context(self._autocast())
        self._running.append((stack, is_outside))

    def _leave(self, _: nn.Module, args: Any, output: Any) -> Any:
        if not self._running:  # another hook failed before this forward began
            return None
        stack, is_outside = self._running.pop()
        stack.close()
        return self._autocast.cast_output(output) if is_outside else None
