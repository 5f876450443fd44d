"""Regions of a forward that compute in FP32, whatever the policy says about the module that they are in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_DEVICE_TYPES = ("cpu", "cuda")


@contextmanager
def full_precision() -> Iterator[None]:
    """Inside, what autocast would compute low is computed in FP32: products, convolutions and FP8 Linears too.

    For use in a model's own forward::

        with dtrain.full_precision():
            energy = torch.einsum("bi,ij,bj->b", x, self.coupling, x)

    Inputs and weights that are BF16 or FP16 are cast as they are used; what rounding they have had, they keep. The
    gradients of what is computed inside are FP32 products as well. Elementwise operations compute in the dtype of their
    inputs, as everywhere under autocast. Where no autocast is on (``precision=fp32`` or ``tf32``, or outside an engine)
    nothing changes: TF32 is a mode of the whole process.

    Under activation checkpointing open the region inside the function that is checkpointed. On CPU, PyTorch does not
    restore a region from outside when it runs the function again: it warns, and most checkpoints then raise.

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


# as torch.compiler.disable marks it: dynamo fails on a change of autocast's dtype; to import it takes a second
vars(full_precision)["_torchdynamo_disable"] = True


def is_exempt(device_type: str) -> bool:
    """Whether a :func:`full_precision` region is open for that type of device."""
    return torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) == torch.float32
