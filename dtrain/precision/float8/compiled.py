"""The FP8 cast as compiled code, which gives the bits of the tensor code in ``dtrain.precision.float8.cast``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from dtrain.precision.float8 import cast
from dtrain.precision.float8.cast import Quantized
from dtrain.precision.float8.proof import proves_quantize


def quantize(x: Tensor, dtype: torch.dtype, *, rowwise: bool, compiled: bool) -> Quantized:
    """Returns what ``dtrain.precision.float8.cast.quantize`` does; ``compiled``: in compiled code, same bits."""
    values, scale = _casts(cast.quantized, x, dtype, rowwise, compiled=compiled)(x, dtype, rowwise)[:2]
    return Quantized(values, scale)


def quantize_both(x: Tensor, dtype: torch.dtype, *, rowwise: bool, compiled: bool) -> tuple[Quantized, Quantized]:
    """Quantizes ``x`` and its transpose; compiled, this reads ``x`` once for both casts."""
    casts = _casts(cast.quantized_both, x, dtype, rowwise, compiled=compiled)
    values, scale, transposed, transposed_scale = casts(x, dtype, rowwise)
    return Quantized(values, scale), Quantized(transposed, transposed_scale)


def _casts(
    plain: Callable[..., tuple[Tensor, ...]], x: Tensor, dtype: torch.dtype, rowwise: bool, *, compiled: bool
) -> Callable[..., tuple[Tensor, ...]]:
    """Returns what does the work of ``plain`` for ``x`` with the same bits: kernels, compiled code, or ``plain``."""
    if not (x.numel() and cast.uses_kernels(x.device, compiled=compiled)):
        return _compiled(plain, dtype, rowwise) if compiled else plain
    from dtrain.kernels.quantize import quantize as by_kernels  # it imports Triton, which only GPUs need

    both = plain is cast.quantized_both
    if not proves_quantize(x, dtype, rowwise=rowwise, both=both):
        return plain
    return lambda x, dtype, rowwise: by_kernels(x, dtype, rowwise=rowwise, both=both)


@cache
def _compiled(function: Callable[..., Any], dtype: torch.dtype, rowwise: bool) -> Callable[..., Any]:
    # once per process and arguments, so that all Linears share the graphs
    # torch keeps eight graphs per code object and then runs new cases eagerly: each combination gets its own code
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return torch.compile(own, dynamic=True)
