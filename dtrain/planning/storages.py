"""Live bytes by the kind of tensor they belong to, while a step runs, and their peak."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.planning.heap import Heap

_DEVICE = torch.ops.prim.device.default


class StorageTracker(TorchDispatchMode):
    """Counts the distinct storages that operations return inside it, until each is freed.

    It works on real and on fake tensors. Memory that a kernel takes and frees within one operation is not seen.

    Attributes:
        label: kind of the storages that are allocated from now on.
        live: bytes by kind.
        peak: ``live`` at the moment when its sum was largest.
        largest: bytes of the largest storage so far.
        heaps: as given.
    """

    def __init__(self, heaps: Sequence[Heap] = ()) -> None:
        """Args:
        heaps: simulated ones that take the same blocks.
        """
        super().__init__()
        self.label = "other"
        self.live: Counter[str] = Counter()
        self.peak: Mapping[str, int] = {}
        self.largest = 0
        self.heaps = heaps
        self._total = self._peak_total = 0
        self._known: dict[int, tuple[str, int]] = {}  # label and bytes, by the identity of the storage

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # nothing is compiled here, and dynamo's guard costs more than the mode
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # the most frequent call, for which the mode is slow
            return args[0].fake_device
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self._add(result)
        else:
            for value in pytree.tree_leaves(result):
                if isinstance(value, Tensor):
                    self._add(value)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        identity = storage._cdata
        if identity in self._known:
            return
        nbytes = storage.nbytes()
        self._known[identity] = self.label, nbytes
        weakref.finalize(storage, self._remove, identity).atexit = False
        self.live[self.label] += nbytes
        self.largest = max(self.largest, nbytes)
        self._total += nbytes
        for heap in self.heaps:
            heap.allocate(identity, nbytes)
        if self._total > self._peak_total:
            self.reset_peak()

    def _remove(self, identity: int) -> None:
        label, nbytes = self._known.pop(identity, ("", 0))
        self._uncount(identity, label, nbytes)

    def _uncount(self, identity: int, label: str, nbytes: int) -> None:
        self.live[label] -= nbytes
        self._total -= nbytes
        for heap in self.heaps:
            heap.release(identity)

    def relabel(self, label: str, tensors: Iterable[Tensor]) -> None:
        """Counts the storages of ``tensors`` as ``label`` from now on."""
        for tensor in tensors:
            self._add(tensor)
            identity = tensor.untyped_storage()._cdata
            before, nbytes = self._known[identity]
            self._known[identity] = label, nbytes
            self.live[before] -= nbytes
            self.live[label] += nbytes

    def exclude(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Counts ``storages`` no longer: they are the memory of others."""
        for storage in storages:
            label, nbytes = self._known.get(storage._cdata, (self.label, 0))
            self._known[storage._cdata] = label, 0
            self._uncount(storage._cdata, label, nbytes)

    def reset_peak(self) -> None:
        """Takes what is live now as the peak."""
        self.peak, self._peak_total = dict(self.live), self._total

    @contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """Inside, what is allocated is of kind ``label``."""
        before, self.label = self.label, label
        try:
            yield
        finally:
            self.label = before
