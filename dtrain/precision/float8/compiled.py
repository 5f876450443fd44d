"""The FP8 cast as compiled code, which gives the bits of the tensor code in ``dtrain.precision.float8.cast``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from dtrain.precision.float8 import cast
from dtrain.precision.float8.cast import Quantized, Scaling
from dtrain.precision.float8.proof import proves_quantize


def quantize(x: Tensor, dtype: torch.dtype, scaling: Scaling, *, compiled: bool) -> Quantized:
    """Returns what ``dtrain.precision.float8.cast.quantize`` does; ``compiled``: in compiled code, same bits."""
    values, scale = _casts(cast.quantized, x, dtype, scaling, compiled=compiled)(x, dtype, scaling)[:2]
    return Quantized(values, scale)


def quantize_both(x: Tensor, dtype: torch.dtype, scaling: Scaling, *, compiled: bool) -> tuple[Quantized, Quantized]:
    """Quantizes ``x`` and its transpose; compiled, this reads ``x`` once for both casts."""
    casts = _casts(cast.quantized_both, x, dtype, scaling, compiled=compiled)
    values, scale, transposed, transposed_scale = casts(x, dtype, scaling)
    return Quantized(values, scale), Quantized(transposed, transposed_scale)


def _casts(
    plain: Callable[..., tuple[Tensor, ...]], x: Tensor, dtype: torch.dtype, scaling: Scaling, *, compiled: bool
) -> Callable[..., tuple[Tensor, ...]]:
    """Returns what does the work of ``plain`` for ``x`` with the same bits: kernels, compiled code, or ``plain``."""
    if not (x.numel() and cast.uses_kernels(x.device, compiled=compiled)):
        return _compiled(plain, dtype, scaling) if compiled else plain
    both = plain is cast.quantized_both
    if scaling is Scaling.SQUARES or not proves_quantize(x, dtype, scaling, both=both):
        return plain
    from dtrain.kernels.quantize import quantize as by_kernels  # it imports Triton, which only GPUs need

    return lambda x, dtype, scaling: by_kernels(x, dtype, scaling.value, both=both)


@cache
def _compiled(function: Callable[..., Any], dtype: torch.dtype, scaling: Scaling) -> Callable[..., Any]:
    # once per process and arguments, so that all Linears share the graphs
    # torch keeps eight graphs per code object and then runs new cases eagerly: each combination gets its own code
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__)
    return torch.compile(own, dynamic=True)
