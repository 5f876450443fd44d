"""References that autograd saves in a forward over sharded weights, instead of views of unsharded replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtrain.precision.fake import is_plain
from dtrain.sharding.group import ParameterGroup
from dtrain.sharding.replicas import Replica
from dtrain.sharding.storage_pool import Places

_STRIDED = torch.strided


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # an address of memory would be that of no fake tensor


class SavedTensorRef(NamedTuple):
    """Reference to a view of a copy of an unsharded replica, which autograd saves instead of the view."""

    group: ParameterGroup
    replica: Replica
    number: int  # of the copy
    places: Places  # one


class SavedTensors:
    """Saves views as references, which are resolved when backward needs them.

    Args:
        unshard: unshards the group of a reference.
    """

    def __init__(self, unshard: Callable[[ParameterGroup], None]) -> None:
        self._unshard = unshard
        self._copies: dict[int, tuple[ParameterGroup, Replica, int]] = {}  # with their numbers, by storage

    def add(self, group: ParameterGroup) -> None:
        """Saves views of ``group``, which is unsharded, as references from now on."""
        for replica in group.replicas:
            for number, flat in enumerate(replica.flat):
                self._copies[_storage(flat.tensor)] = group, replica, number

    def remove(self, group: ParameterGroup) -> None:
        """Forgets the storages of ``group``, which may be given to other tensors once it is resharded."""
        for replica in group.replicas:
            for flat in replica.flat:
                self._copies.pop(_storage(flat.tensor), None)

    def pack(self, tensor: Tensor) -> Any:
        """Saves a view of an unsharded replica as a reference, any other tensor with its version."""
        # this and `unpack` run for every tensor that backward needs, so they call little
        if (type(tensor) is Tensor or is_plain(tensor)) and tensor.layout is _STRIDED:
            found = self._copies.get(tensor.untyped_storage()._cdata)
            # a view in another dtype has strides and offsets in its own elements, so it is saved as it is
            if found is not None and tensor.dtype == found[1].layout.dtype:
                return SavedTensorRef(*found, ((tensor.size(), tensor.stride(), int(tensor.storage_offset())),))
        # detached: autograd would keep an output alive that holds its own graph; the version is shared
        return tensor.detach() if tensor.requires_grad else tensor, tensor._version

    def unpack(self, saved: Any) -> Tensor:
        """Returns the tensor; unshards the group of a reference."""
        if type(saved) is SavedTensorRef:
            self._unshard(saved.group)
            return saved.replica.flat[saved.number].views(saved.places)[0]
        tensor: Tensor
        tensor, version = saved
        if tensor._version != version:  # torch checks this only without hooks
            raise RuntimeError(
                f"a tensor that backward needs was modified in place: {tensor.dtype} {list(tensor.shape)} is at "
                f"version {tensor._version}, and was at version {version} in the forward"
            )
        return tensor
