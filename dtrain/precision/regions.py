"""Regions of a forward that compute in FP32, whatever the module's format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_DEVICE_TYPES = ("cpu", "cuda")


@contextmanager
def full_precision() -> Iterator[None]:
    """Computes in FP32 what autocast would compute in reduced precision: matmuls, convolutions and FP8 Linears.

    Use it in a model's own forward::

        with dtrain.full_precision():
            energy = torch.einsum("bi,ij,bj->b", x, self.coupling, x)

    BF16 and FP16 inputs and weights are cast on use, and keep the rounding that they already have. The backward of the
    region is FP32 too. Elementwise operations compute in the dtype of their inputs, as always under autocast. Nothing
    changes if autocast is off (``precision=fp32`` or ``tf32``, or outside an engine): TF32 is a mode of the process.

    With activation checkpointing, open the region inside the checkpointed function. On CPU, PyTorch does not restore a
    region opened outside when it runs the function again: it warns, and most checkpoints then raise.

    ``torch.compile`` breaks its graph at a region: the rest of the function that opens it runs uncompiled.
    """
    entered = [(name, torch.get_autocast_dtype(name)) for name in _DEVICE_TYPES if torch.is_autocast_enabled(name)]
    for name, _ in entered:
        torch.set_autocast_dtype(name, torch.float32)
    try:
        yield
    finally:
        for name, dtype in entered:
            torch.set_autocast_dtype(name, dtype)


# what torch.compiler.disable sets, without its import of dynamo, which takes a second: dynamo fails if the dtype of
# autocast changes
vars(full_precision)["_torchdynamo_disable"] = True


def in_full_precision_region(device_type: str) -> bool:
    """Whether a :func:`full_precision` region is open for that device type."""
    return torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) == torch.float32
