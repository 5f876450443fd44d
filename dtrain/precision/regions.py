"""Regions of a forward that compute in FP32, whatever the module's format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

_DEVICE_TYPES = ("cpu", "cuda")


_traced = False  # whether a compiler traces regions


def full_precision() -> AbstractContextManager[None]:
    """Computes in FP32 what autocast would compute in reduced precision: matmuls, convolutions and FP8 Linears.

    Use it in a model's own forward. BF16 and FP16 inputs and weights are cast on use, and keep the rounding that they
    have. The backward of the region is FP32 too. Elementwise operations compute in the dtype of their inputs. Nothing
    changes if autocast is off (``precision=fp32`` or ``tf32``, or outside an engine): TF32 is a mode of the process.

    With activation checkpointing, open the region inside the checkpointed function. On CPU, PyTorch does not restore a
    region opened outside when it runs the function again: it warns, and most checkpoints then raise.

    A block that the engine compiles (``dtrain.Blocks(compile="blocks")``) contains its regions. Your own
    ``torch.compile`` breaks its graph at a region: the rest of the function that opens it runs uncompiled.

    Examples:
        >>> class Model(torch.nn.Linear):
        ...     def forward(self, x):
        ...         print((x @ self.weight.T).dtype)
        ...         with dtrain.full_precision():
        ...             print((x @ self.weight.T).dtype)
        >>> dtrain.initialize(Model(4, 1), precision="bf16")(torch.ones(1, 4))
        torch.bfloat16
        torch.float32
    """
    if _traced and torch.compiler.is_compiling():
        return _in_graph()
    return _region()


@contextmanager
def _region() -> Iterator[None]:
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
vars(_region)["_torchdynamo_disable"] = True


@contextmanager
def _in_graph() -> Iterator[None]:
    with _autocast_to_fp32("cpu"), _autocast_to_fp32("cuda"):
        yield


@contextmanager
def _autocast_to_fp32(device_type: str) -> Iterator[None]:
    if not torch.is_autocast_enabled(device_type):
        yield
        return
    # the outer context, which dynamo knows, restores the dtype; by itself it would refuse FP32 on a CPU
    with torch.autocast(device_type):
        _set_fp32(device_type)
        yield


def _set_fp32(device_type: str) -> None:
    torch.set_autocast_dtype(device_type, torch.float32)


def trace_regions(*, enabled: bool) -> None:
    """Lets ``torch.compile`` trace regions from now on, or break its graph there; a process-wide setting.

    Dynamo cannot break a graph *inside* a region that it traces: it raises an ``AssertionError`` about the state of
    autocast.
    """
    global _traced
    _traced = enabled
    if enabled:
        torch.compiler.allow_in_graph(_set_fp32)


def traces_regions() -> bool:
    """Whether ``torch.compile`` traces regions."""
    return _traced


def in_full_precision_region(device_type: str) -> bool:
    """Whether a ``full_precision`` region is open for that device type."""
    return torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) == torch.float32
