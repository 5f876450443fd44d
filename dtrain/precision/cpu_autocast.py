"""What CPU's autocast lacks beside CUDA's: softmax and norms in FP32, and embeddings whose gradient is summed in FP32.

The kernels are registered with the dispatcher under the AutocastCPU key, so that composite functions (attention with
weights, ``gumbel_softmax``) are covered as well. They act only inside :func:`enabled`; elsewhere a user's own CPU
autocast stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

_OPS = ("softmax.int", "log_softmax.int", "layer_norm", "group_norm", "rms_norm", "instance_norm", "batch_norm")
_LOW = (torch.bfloat16, torch.float16)

_depth = 0  # of nested `enabled`; backward on CPU runs on the thread that called it, so no lock is needed


@contextmanager
def enabled() -> Iterator[None]:
    """Inside, and under CPU autocast, the listed functions run in FP32.

    For backward as well: activation checkpointing runs forwards again there, under the autocast it has saved.
    """
    global _depth
    _register()
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def to_fp32(value: Any) -> Any:
    """``value``, in FP32 where it is a BF16 or FP16 tensor."""
    return value.float() if isinstance(value, Tensor) and value.dtype in _LOW else value


@cache
def _register() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    for name in _OPS:
        op, _, overload = name.partition(".")
        library.impl(name, _in_fp32(getattr(getattr(torch.ops.aten, op), overload or "default")), "AutocastCPU")
    library.impl("embedding", _embedding, "AutocastCPU")
    return library  # cached, because the registration ends with it


def _in_fp32(op: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            if not _depth:
                return op(*args, **kwargs)
            return op(*map(to_fp32, args), **{name: to_fp32(value) for name, value in kwargs.items()})

    return kernel


def _embedding(weight: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A look-up in FP32 where there will be a gradient.

    CPU adds the gradient rows of a repeated token one by one in the table's dtype, and a BF16 sum stops growing after
    some 256 equal addends; CUDA sums them in FP32 by itself.
    """
    table = weight.float() if _depth and torch.is_grad_enabled() else weight
    with torch.autocast("cpu", enabled=False):
        rows: Tensor = torch.ops.aten.embedding.default(table, indices, *args, **kwargs)
    return rows.to(weight.dtype)
