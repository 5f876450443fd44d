"""The forwards of a step, kept so that a micro-batch can be run again: to explain a skip, or to compare its bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dtrain.distributed.communicator import Communicator


class ForwardEngine(Protocol):
    """The part of :class:`dtrain.engine.step.StepEngine` that runs a micro-batch again; see there."""

    name: str
    module: nn.Module
    comm: Communicator
    searches_backward: bool

    def run_forward(self, key: int | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the model's forward under the contract, with random numbers seeded by ``key``."""

    def backward_precision(self) -> AbstractContextManager[None]:
        """Context of a backward: forwards that recomputation repeats there follow the contract."""

    def discard_forward(self) -> None:
        """Releases what the engine holds of a forward that gets no backward."""


@dataclass(frozen=True)
class ForwardCall:
    """A call of the engine: the key of its random numbers, None for none, and its arguments."""

    key: int | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class ForwardCalls:
    """Keeps references to the arguments of a step's forwards until the step is finalized.

    The caller must not overwrite them before the next step.
    """

    def __init__(self) -> None:
        self._current: dict[int, list[ForwardCall]] = {}  # of the step under way, by micro-batch
        self._last: dict[int, list[ForwardCall]] = {}  # of the last step, until it is finalized

    def remember(self, micro_batch: int, key: int | None, args: Any, kwargs: Any, *, is_first: bool) -> None:
        """Keeps the arguments of a forward, the first of its micro-batch or a later one."""
        if is_first:  # of its micro-batch: those before it were given up
            self._current[micro_batch] = []
        args, kwargs = pytree.tree_map(_without_graph, (args, kwargs))
        self._current.setdefault(micro_batch, []).append(ForwardCall(key, args, kwargs))

    def end_step(self) -> None:
        """The arguments kept so far are those of the step that is to be finalized."""
        self._last, self._current = self._current, {}

    def forget(self) -> None:
        """Releases the last step's arguments."""
        self._last = {}

    def current(self, micro_batch: int) -> list[ForwardCall]:
        """Returns the forwards of a micro-batch of the step under way."""
        return self._current.get(micro_batch, [])

    def last(self, micro_batch: int) -> list[ForwardCall]:
        """Returns the forwards of a micro-batch of the last step."""
        return self._last.get(micro_batch, [])


def _without_graph(value: Any) -> Any:
    """Detaches a tensor, so that no graph of another model is kept alive."""
    if isinstance(value, Tensor) and value.requires_grad:
        return value.detach().requires_grad_()
    return value


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Inside, the buffers are copies: the graph of a forward that awaits its backward may hold the originals."""
    buffers = [(module, name, b) for module in model.modules() for name, b in module._buffers.items() if b is not None]
    copies = {id(buffer): buffer.clone() for _, _, buffer in buffers}
    try:
        for module, name, buffer in buffers:
            module._buffers[name] = copies[id(buffer)]
        yield
    finally:
        for module, name, buffer in buffers:
            module._buffers[name] = buffer
