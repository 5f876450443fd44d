"""Memory of unsharded replicas on a CPU, reused from one unit to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# private, but alike in torch 2.11 to 2.13; without it nothing is reused
_use_count: Callable[[Any], int] | None = getattr(torch._C, "_storage_Use_Count", None)


class StoragePool:
    """Storages that are reused, by their size; they are kept from one step to the next.

    malloc would return memory of this size to the system, and the page faults of taking it again would be most of the
    time that stage 3 takes in addition to stage 2. A GPU's allocator keeps its memory by itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_used = device.type == "cpu" and _use_count is not None
        self._free: dict[int, list[Any]] = {}  # by bytes

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns [numel], not initialized."""
        free = self._free.get(numel * dtype.itemsize, [])
        while free:
            storage = free.pop()
            # a view that a caller or autograd has kept holds the storage; then it stays theirs
            if _use_count is not None and _use_count(storage._cdata) == 1:
                return torch.empty(0, dtype=dtype).set_(storage, 0, (numel,))  # type: ignore[call-overload,no-any-return]
        return torch.empty(numel, dtype=dtype, device=device)

    def give(self, tensor: Tensor) -> None:
        """Takes back the memory of ``tensor``, which the caller drops."""
        if self._is_used and tensor.numel():
            storage = tensor.untyped_storage()
            self._free.setdefault(storage.nbytes(), []).append(storage)
