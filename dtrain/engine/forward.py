"""Runs a forward of the model under the contract, for the engine and to run a micro-batch again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from dtrain.distributed.communicator import Communicator
from dtrain.engine.observation import ForwardObserver
from dtrain.engine.parts.part import Forward
from dtrain.engine.rng import keyed_rng
from dtrain.precision.contract import Contract
from dtrain.precision.forward import Autocast
from dtrain.precision.policy import sparse_gradients_refused


class ModelForward:
    """Runs the model of one engine.

    Args:
        module: the model.
        comm, contract: of the engine.
        call: calls the model with ``args`` and ``kwargs``, as the engine's library wants it.
        discard: releases what the engine holds of a forward that gets no backward.
        engine: its name.
        searches_backward: whether a backward can be repeated without its gradients reaching a main grad.

    Attributes:
        autocast: installs the contract on the model, and holds in a forward.
        observer: checks the first forward against the contract.
        rng: returns the context in which a forward draws random numbers by a key.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        contract: Contract,
        call: Callable[[tuple[Any, ...], Mapping[str, Any]], Any],
        discard: Callable[[], None],
        *,
        engine: str,
        searches_backward: bool,
    ) -> None:
        self.module, self.comm, self.engine = module, comm, engine
        self.searches_backward = searches_backward
        self.discard = discard
        self.autocast = Autocast(contract, module, comm.device)
        self.observer = ForwardObserver(module, contract)
        self._call = call
        self.rng: Callable[[torch.device, int], AbstractContextManager[None]] = keyed_rng

    def __call__(self, call: Forward) -> Any:
        """Runs a call of the engine; the first one with a graph is checked against the contract."""
        with self.observer.forward():
            return self.run(call.key, call.args, call.kwargs)

    def run(self, key: int | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs a forward under the contract; ``key`` seeds its random numbers, None leaves them."""
        keyed: Any = nullcontext() if key is None else self.rng(self.comm.device, key)
        with keyed, self.autocast():
            return self.autocast.cast_output(self._call(args, kwargs))

    @contextmanager
    def backward_precision(self) -> Iterator[None]:
        """Context of a backward: repeated forwards follow the contract, and a sparse gradient is an error by name."""
        with self.autocast.backward(), sparse_gradients_refused(self.module):
            yield
