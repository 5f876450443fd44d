"""The engine whose backward runs in this process, so that another engine can tell whose gradients reach it.

[Note: another engine's backward] The backward of a generator's loss passes through the discriminator, whose parameters
get gradients too. They belong to no micro-batch of the discriminator's engine, which ignores them, as plain PyTorch
does after ``zero_grad``, and keeps what it has accumulated. A gradient while no engine's backward runs is an error.

It is a variable of the process and not of a thread: on a GPU, autograd calls hooks in threads of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol
from weakref import WeakSet

import torch

from dtrain.errors import UsageError


class Hidden(Protocol):
    """What hides something while a backward runs."""

    def hidden(self) -> AbstractContextManager[None]: ...


hidden_in_backwards: WeakSet[Hidden] = WeakSet()
"""Those that have something to hide now: what autograd would add a gradient to."""

_running: tuple[object, ExitStack] | None = None  # the engine, and what ends with its backward


@contextmanager
def backward_of(engine: object) -> Iterator[None]:
    """Context of a backward of ``engine``."""
    global _running
    outer = _running
    with ExitStack() as joined:
        for one in list(hidden_in_backwards):
            joined.enter_context(one.hidden())
        _running = engine, joined
        try:
            yield
        finally:
            _running = outer


def running_engine() -> object | None:
    """Returns the engine whose backward runs, if any."""
    return None if _running is None else _running[0]


def is_in_backward() -> bool:
    """Whether a backward runs: an engine's, or one of the user's own, as of ``torch.autograd.grad``."""
    # the second is private, but torch.utils.checkpoint depends on it
    return _running is not None or torch._C._current_graph_task_id() != -1


def join_backward(context: AbstractContextManager[None]) -> None:
    """Enters ``context``, of a generator, until the backward that runs has ended."""
    if _running is not None:
        _running[1].enter_context(context)
    else:
        stack = ExitStack()
        stack.enter_context(context)
        # an error drops the callback instead, and with it the generator, whose ``finally`` then runs
        torch.autograd.Variable._execution_engine.queue_callback(stack.close)


def require_running(name: str) -> None:
    """Checks that the gradient of parameter ``name``, not of its engine's backward, is of another engine's.

    Raises:
        UsageError: no engine's backward runs.
    """
    if _running is None:
        raise UsageError(f"'{name}' got a gradient outside engine.backward; call engine.backward(loss) instead")
