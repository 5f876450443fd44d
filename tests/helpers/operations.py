"""Counts the operations of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class _Operations(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def operations_of(work: Callable[[], Any]) -> int:
    """Returns the number of torch's operations in ``work``, below autograd, views and allocations too."""
    with _Operations() as counted:
        work()
    return counted.number
