"""Memory of unsharded replicas, which a CPU reuses from one unit to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# private, but alike in torch 2.11 to 2.13; without it nothing is reused
_use_count: Callable[[Any], int] | None = getattr(torch._C, "_storage_Use_Count", None)

_MAX_VIEWS = 256  # that one flat tensor keeps

Places = tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]
"""Size, strides and offset of each of several views."""


class FlatTensor:
    """A 1-D tensor, and views of it, which are made once: each takes as long as a small operation.

    Attributes:
        tensor: see above.
        num_tensors: number of tensors that it holds.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.num_tensors = 1
        self._start = int(tensor.storage_offset())
        self._views: dict[Places, Sequence[Tensor]] = {}

    def views(self, places: Places) -> Sequence[Tensor]:
        """Returns the views at ``places``, whose offsets count from the first element."""
        found = self._views.get(places)
        if found is None:
            found = [self.tensor.as_strided(size, strides, self._start + offset) for size, strides, offset in places]
            if len(self._views) < _MAX_VIEWS:
                self._views[places] = found
                self.num_tensors += len(found)
        return found


class StoragePool:
    """Flat tensors whose storages are reused, by their size; they are kept from one step to the next.

    malloc would return memory of this size to the system, and the page faults of taking it again would be most of the
    time that stage 3 takes in addition to stage 2. A GPU's allocator keeps its memory by itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_used = device.type == "cpu" and _use_count is not None
        self._free: dict[int, list[FlatTensor]] = {}  # by bytes

    @property
    def free(self) -> list[Tensor]:
        """Tensors whose memory is kept to be reused."""
        return [flat.tensor for free in self._free.values() for flat in free]

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> FlatTensor:
        """Returns [numel], not initialized."""
        free = self._free.get(numel * dtype.itemsize, [])
        while free:
            flat = free.pop()
            storage = flat.tensor.untyped_storage()
            # a view that a caller or autograd has kept holds the storage; then it stays theirs
            if _use_count is not None and _use_count(storage._cdata) == flat.num_tensors + 1:
                if flat.tensor.dtype == dtype:
                    return flat
                return FlatTensor(torch.empty(0, dtype=dtype).set_(storage, 0, (numel,)))  # type: ignore[call-overload]
        return FlatTensor(torch.empty(numel, dtype=dtype, device=device))

    def give(self, flat: FlatTensor) -> None:
        """Takes back the memory of ``flat``, which the caller drops."""
        if self._is_used and flat.tensor.numel():
            self._free.setdefault(flat.tensor.nbytes, []).append(flat)
