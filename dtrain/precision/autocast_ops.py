"""Autocast kernels for the operations that PyTorch's autocast lists omit on a device.

The intended lists: matmuls and convolutions run in reduced precision; softmax, norms, losses, reductions and ``linalg``
run in FP32. PyTorch's lists differ between CPU and CUDA and both have gaps: softmax and norms stay in reduced precision
on CPU, and ``linalg`` raises on CUDA. Kernels registered under the device's autocast dispatch key fill the gaps, also
for composite functions (attention with weights, ``gumbel_softmax``, ``torch.det``). The kernels act only inside
``enabled``; elsewhere autocast is unchanged.

[Note: FP32 beside 16 bits] Norms return FP32, but parameters, and what a model creates from them, have 16 bits, where
plain autocast has FP32 for both. Most elementwise operations promote such a pair. Those that refuse it, or that take a
number beyond the range of 16 bits, such as the minimum of FP32 in a mask, are adapted here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

_NORMS = ("softmax.int", "log_softmax.int", "layer_norm", "group_norm", "rms_norm", "instance_norm", "batch_norm")
# composite functions are listed only if they refuse reduced-precision inputs or multiply matrices
_REDUCTIONS = (
    *("sum", "sum.dim_IntList", "nansum", "mean", "mean.dim", "prod", "prod.dim_int"),
    *("var.correction", "std.correction", "var_mean.correction", "std_mean.correction", "cov", "trace"),
    *("cumsum", "cumprod", "logcumsumexp", "logsumexp"),
    *("norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim_dtype", "renorm"),
    *("linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "nuclear_norm", "nuclear_norm.dim"),
    *("dist", "pdist", "cdist", "cosine_similarity"),
)
_LINALG = (
    *("linalg_inv", "linalg_inv_ex", "inverse", "linalg_pinv", "linalg_pinv.atol_rtol_tensor"),
    *("linalg_pinv.atol_rtol_float", "linalg_tensorinv", "linalg_matrix_power", "linalg_matrix_exp"),
    *("linalg_solve", "linalg_solve_ex", "_linalg_solve_ex", "linalg_solve_triangular", "triangular_solve"),
    *("linalg_tensorsolve", "linalg_lstsq", "linalg_cond", "linalg_matrix_rank"),
    *("linalg_det", "_linalg_det", "logdet", "linalg_slogdet", "_linalg_slogdet"),
    *("linalg_cholesky", "linalg_cholesky_ex", "cholesky", "cholesky_inverse", "cholesky_solve"),
    *("linalg_qr", "qr", "geqrf", "ormqr", "linalg_householder_product"),
    *("linalg_svd", "_linalg_svd", "svd", "linalg_svdvals"),
    *("linalg_eig", "linalg_eigvals", "linalg_eigh", "_linalg_eigh", "linalg_eigvalsh"),
    *("linalg_lu", "linalg_lu_factor", "linalg_lu_factor_ex", "linalg_lu_solve", "lu_solve", "_lu_with_info"),
    *("linalg_ldl_factor", "linalg_ldl_factor_ex", "linalg_ldl_solve"),
)
_LOSSES = ("ctc_loss.IntList", "ctc_loss.Tensor")  # all other losses are on both devices' lists, or composed of such
_FP32 = (*_NORMS, *_REDUCTIONS, *_LINALG, *_LOSSES)
_PRODUCTS = (
    *("mv", "addmv", "addr", "dot", "vdot", "bilinear", "chain_matmul", "linalg_multi_dot"),
    *("gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell"),
)
_WRITES = ("index_add", "index_copy", "index_put", "scatter.src", "scatter_add", "scatter_reduce.two", "masked_scatter")
_PROMOTED = (*_WRITES, "lerp.Scalar", "lerp.Tensor", "complex", "polar", "linalg_cross", "isclose")
_FILLS = (
    *("masked_fill.Scalar", "masked_fill.Tensor", "index_fill.int_Scalar", "scatter.value", "clamp"),
    *("clamp_min", "clamp_max"),
)
_FILLS_OUT_OF_PLACE = ("full_like", "new_full", "where.ScalarOther", "where.ScalarSelf", "constant_pad_nd")
_REDUCED_PRECISION = (torch.bfloat16, torch.float16)
_FP16_MAX = torch.finfo(torch.float16).max
_FLOATS = (*_REDUCED_PRECISION, torch.float32)

# nesting depth of `enabled`. A global, because backward runs in threads of its own; no second forward runs meanwhile
_depth = 0


@contextmanager
def enabled(device_type: str) -> Iterator[None]:
    """Enables the kernels of this module under autocast of ``device_type`` (``cpu`` or ``cuda``).

    Backward needs it too: activation checkpointing runs forwards again there, under the autocast that it saved.
    """
    global _depth
    _register(device_type)
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def is_enabled() -> bool:
    return _depth > 0


class _Disabled:
    """Switches autocast of a device type off, which takes a tenth of the time of ``torch.autocast(enabled=False)``."""

    __slots__ = ("_device_type", "_was_enabled")

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def __enter__(self) -> None:
        self._was_enabled = torch.is_autocast_enabled(self._device_type)
        torch.set_autocast_enabled(self._device_type, False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled(self._device_type, self._was_enabled)


def disabled(device_type: str) -> AbstractContextManager[Any]:
    """Returns a context without autocast of ``device_type``."""
    # torch.compile knows torch's own
    return torch.autocast(device_type, enabled=False) if torch.compiler.is_compiling() else _Disabled(device_type)


def to_fp32(value: Any) -> Any:
    """Casts ``value`` to FP32 if it is a BF16 or FP16 tensor."""
    return value.float() if isinstance(value, Tensor) and value.dtype in _REDUCED_PRECISION else value


@cache
def _register(device_type: str) -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    key = f"Autocast{device_type.upper()}"

    def fill_gaps(names: Iterable[str], kernel: Callable[[str], Callable[..., Any]]) -> None:
        for name in names:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
                library.impl(name, kernel(name), key, with_keyset=True)

    fill_gaps(_FP32, lambda name: _casting(name, to_fp32, device_type))
    fill_gaps(_PRODUCTS, lambda name: _casting(name, partial(_to_autocast_dtype, device_type=device_type), device_type))
    fill_gaps(_PROMOTED, lambda name: _adapting(name, _promoted, device_type))
    fill_gaps(map(_in_place, _WRITES), lambda name: _adapting(name, _in_dtype_of_first, device_type))
    fills = (*_FILLS, *map(_in_place, _FILLS), *_FILLS_OUT_OF_PLACE, "fill_.Scalar")
    fill_gaps(fills, lambda name: _adapting(name, _in_range, device_type))
    if device_type == "cpu":
        library.impl("embedding", _embedding, key)
    return library  # cached, because the registration ends with it


def _in_place(name: str) -> str:
    op, dot, overload = name.partition(".")
    return f"{op}_{dot}{overload}"


def _below_autocast(name: str, device_type: str) -> tuple[Any, Any]:
    """Returns the operation called ``name`` and the dispatch keys of what follows autocast."""
    op, _, overload = name.partition(".")
    below = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}"))
    return getattr(getattr(torch.ops.aten, op), overload or "default"), below


def _casting(name: str, cast: Callable[[Any], Any], device_type: str) -> Callable[..., Any]:
    function, below = _below_autocast(name, device_type)

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if not _depth:
            return function.redispatch(keys & below, *args, **kwargs)  # PyTorch's own behavior
        # not torch.autocast(enabled=False), which takes longer than a small operation
        torch.set_autocast_enabled(device_type, False)
        try:
            return function(*map(cast, args), **{key: cast(value) for key, value in kwargs.items()})
        finally:
            torch.set_autocast_enabled(device_type, True)

    return kernel


def _to_autocast_dtype(value: Any, device_type: str) -> Any:
    if isinstance(value, Tensor):
        return value.to(torch.get_autocast_dtype(device_type)) if value.dtype in _FLOATS else value
    if isinstance(value, (list, tuple)):
        return [_to_autocast_dtype(item, device_type) for item in value]
    return value


def _adapting(name: str, adapt: Callable[..., tuple[Any, Any]], device_type: str) -> Callable[..., Any]:
    function, below = _below_autocast(name, device_type)

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if _depth:  # [Note: FP32 beside 16 bits]
            args, kwargs = adapt(args, kwargs)
        return function.redispatch(keys & below, *args, **kwargs)

    return kernel


def _promoted(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Casts floating tensors of different dtypes to the widest of them."""
    dtypes = {value.dtype for value in args if isinstance(value, Tensor) and value.dtype in _FLOATS}
    return (_to_dtype(args, torch.float32), kwargs) if len(dtypes) > 1 else (args, kwargs)


def _in_dtype_of_first(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Casts what is written into a tensor, the first argument, to its dtype."""
    dtype = args[0].dtype
    return (_to_dtype(args, dtype), kwargs) if dtype in _FLOATS else (args, kwargs)


def _to_dtype(values: Any, dtype: torch.dtype) -> list[Any]:
    return [v.to(dtype) if isinstance(v, Tensor) and v.dtype in _FLOATS and v.dtype != dtype else v for v in values]


def _in_range(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Replaces finite numbers beyond the range of the tensor that they fill by its lowest or largest number."""
    if not any(map(_may_overflow, args)):  # keyword arguments arrive as positional ones, if they have a place
        return args, kwargs
    own = (value.dtype for value in args if isinstance(value, Tensor) and value.is_floating_point())
    dtype = kwargs.get("dtype") or next(own, None)
    if dtype not in _REDUCED_PRECISION:
        return args, kwargs
    low, high = torch.finfo(dtype).min, torch.finfo(dtype).max

    def saturate(value: Any) -> Any:
        if not _may_overflow(value):
            return value
        if isinstance(value, float):
            return min(max(value, low), high)
        return torch.where(value.isfinite(), value.clamp(low, high), value)

    return [saturate(value) for value in args], kwargs


def _may_overflow(value: Any) -> bool:
    if isinstance(value, float):
        return _FP16_MAX < abs(value) < math.inf
    return isinstance(value, Tensor) and value.dtype == torch.float32 and not value.dim()


def _embedding(weight: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Looks up in an FP32 table if a gradient will be needed.

    CPU adds the gradient rows of a repeated token one by one in the table's dtype, and a BF16 sum stops growing after
    about 256 equal addends. CUDA already sums them in FP32.
    """
    table = weight.float() if _depth and torch.is_grad_enabled() else weight
    with _Disabled("cpu"):
        rows: Tensor = torch.ops.aten.embedding.default(table, indices, *args, **kwargs)
    return rows.to(weight.dtype)
