"""Fake tensors: shapes and dtypes without values or memory, on which a plan runs the steps of an engine."""

from __future__ import annotations

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

_STORAGE_BITS = 48  # more than the bytes of any storage


def is_fake(tensor: Tensor) -> bool:
    """Whether ``tensor`` has no memory."""
    return tensor.untyped_storage().device.type == "meta"


def is_plain(tensor: Tensor) -> bool:
    """Whether ``tensor`` is of no class of a user's own, which may not hold its values itself."""
    return type(tensor) in (Tensor, nn.Parameter, FakeTensor)


def address(tensor: Tensor) -> int:
    """Returns where the memory of ``tensor`` begins.

    The identity of its storage stands for that of a fake tensor, so that views of one storage have the distances that
    they would have, and views of two never meet.
    """
    if not is_fake(tensor):
        return tensor.data_ptr()
    return (int(tensor.untyped_storage()._cdata) << _STORAGE_BITS) + int(tensor.storage_offset()) * tensor.itemsize


def block_starts(tensor: Tensor, size: int) -> range:
    """Returns where the blocks of ``size`` elements of ``tensor`` begin.

    Only the first of a fake tensor, which stands for the others: they would take the same memory one after the other.
    """
    numel = tensor.numel()
    return range(0, min(size, numel) if is_fake(tensor) else numel, max(size, 1))
