"""Recorded products in other sizes and formats, and the time that they take beside the recorded ones."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from dtrain.device import alternating_ms
from dtrain.planning.record.products import ATTENTION, CONVOLUTION, GROUPED, MATMUL, OPERANDS, MatrixProduct
from dtrain.planning.record.recorder import Signature, TensorSpec
from dtrain.planning.shapes.rules import Cause, dimensions
from dtrain.precision.float8.matmul import ALIGNMENT
from dtrain.precision.hardware import has_bf16_products, has_float8_tensor_cores

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_ROUNDS, _LEAST_ROUNDS = 15, 5
_LEAST_MS = 1.0  # shorter intervals measure the clock


def padded_signature(cause: Cause, product: MatrixProduct, multiple: int) -> Signature | None:
    """Returns the call of ``product`` with the sizes of ``cause`` padded, or None if it has none of them."""
    found = [(name[0], size) for kind, name, size in dimensions(product) if kind == cause.kind and size in cause.sizes]
    if not found or (product.kind == CONVOLUTION and product.batch != 1):
        return None

    def padded(value: Any, names: str) -> Any:
        sizes = value.shape if isinstance(value, TensorSpec) else value  # the sizes of a convolution's bias
        if isinstance(sizes, tuple) and any(isinstance(size, TensorSpec) for size in sizes):
            return tuple(padded(size, names) for size in sizes)
        if not isinstance(sizes, tuple) or (product.kind == ATTENTION and len(sizes) != 4):  # sums of rows
            return value
        dims = zip(names[-len(sizes) :].ljust(len(sizes)), sizes, strict=False)
        # a scale or a bias may have 1 instead
        sizes = tuple(cause.padded(size, multiple) if (letter, size) in found else size for letter, size in dims)
        return _in_shape(value, sizes) if isinstance(value, TensorSpec) else sizes

    signature = product.call.signature
    names = OPERANDS.get(signature.name, ("   h",) * len(signature.args))
    return replace(signature, args=(*map(padded, signature.args, names), *signature.args[len(names) :]))


def _in_shape(spec: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    """Returns ``spec`` in another shape, its dimensions in the same order in memory."""
    stride, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (spec.stride[dim], -dim)):
        if spec.stride[dim]:  # else it is expanded
            stride[dim] = step
            step *= shape[dim]
    return TensorSpec(shape, tuple(stride), spec.dtype)


def in_format(product: MatrixProduct, name: str) -> Signature:
    """Returns the call of ``product`` in a format.

    It is in FP8 only where dtrain would compute so: products of two matrices whose sizes are multiples of 16.
    """
    is_linear = product.kind == MATMUL and product.batch == 1 and not product.is_grouped
    if name == "fp8" and (not is_linear or product.n % ALIGNMENT or product.k % ALIGNMENT):
        return product.call.signature
    dtype = DTYPES.get(name, torch.float8_e4m3fn)
    left = TensorSpec((product.m, product.k), (product.k, 1), dtype)
    right = TensorSpec((product.k, product.n), (1, product.k), dtype)
    if name == "fp8":
        scale = TensorSpec((), (), torch.float32)
        options = (("out_dtype", torch.bfloat16),)
        return Signature(torch.ops.aten._scaled_mm.default, (left, right, scale, scale), options)
    if product.format == "fp8":
        return Signature(torch.ops.aten.mm.default, (left, right), ())

    def converted(value: Any) -> Any:
        is_operand = isinstance(value, TensorSpec) and value.dtype in DTYPES.values()
        # attention keeps the sums of its rows, of three dimensions, in FP32
        is_sum = product.kind == ATTENTION and is_operand and len(value.shape) != 4
        return replace(value, dtype=dtype) if is_operand and not is_sum else value

    return product.call.signature.map(converted)


def measured_gain(cause: Cause, multiple: int, device: torch.device, budget_s: float) -> float | None:
    """Returns the share of the time of the products of ``cause`` that padding to ``multiple`` saves.

    It is None if the measurement would take more than ``budget_s`` seconds.
    """
    calls = {product.call: product for product in cause.products}  # a convolution's gradients are of one call
    padded = ((call.signature, padded_signature(cause, product, multiple)) for call, product in calls.items())
    pairs = Counter((before, after) for before, after in padded if after is not None)
    ratio = timed_ratio(dict(pairs.most_common()), device, budget_s)
    return None if ratio is None else 1 - ratio


def timed_ratio(
    pairs: Mapping[tuple[Signature, Signature], int], device: torch.device, budget_s: float
) -> float | None:
    """Returns the time of the second calls of ``pairs``, as often as counted, as a share of the time of the first.

    It is None without pairs, or if five rounds of each would take more than ``budget_s`` seconds.
    """
    deadline = time.monotonic() + budget_s
    before = after = 0.0
    for number, (pair, count) in enumerate(pairs.items()):
        runs = {name: bind(call, device) for name, call in zip(("before", "after"), pair, strict=True)}
        once = [ms for (ms,) in alternating_ms(runs, device, 1).values()]
        calls = max(1, round(_LEAST_MS / max(min(once), 1e-3)))
        most = 1e3 * (deadline - time.monotonic()) / max(calls * sum(once), 1e-3)
        if most < _LEAST_ROUNDS:
            return None
        rounds = min(_ROUNDS, max(_LEAST_ROUNDS, int(most / (len(pairs) - number))))
        taken = alternating_ms(runs, device, rounds, calls=calls, warmup=0)
        before += count * median(taken["before"])
        after += count * median(taken["after"])
    return after / before if pairs else None


def bind(signature: Signature, device: torch.device) -> Callable[[], Any]:
    """Returns a function that calls the operation on new tensors of ``device`` with random values."""
    real = signature.map(lambda value: _tensor_of(value, device) if isinstance(value, TensorSpec) else value)
    args = list(real.args)
    if signature.name == GROUPED:  # each expert has the same number of rows
        left, right, ends = args[:3]
        total = right.shape[-1] if left.ndim == 3 else left.shape[0] if right.ndim == 3 else left.shape[-1]
        args[2] = (torch.arange(1, len(ends) + 1) * total // len(ends)).to(ends)
    return partial(signature.func, *args, **dict(real.kwargs))


def _tensor_of(spec: TensorSpec, device: torch.device) -> Tensor:
    """Returns a tensor of random values; integers, such as indices and seeds, are 0."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True))
    values = torch.zeros(extent if spec.nbytes else 0, dtype=spec.dtype, device=device)
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        values = torch.randn_like(values, dtype=None if spec.dtype.itemsize > 1 else torch.float32).to(spec.dtype)
    return values.as_strided(spec.shape, spec.stride)


def has_products(name: str, device: torch.device) -> bool:
    """Whether ``device`` multiplies matrices of a format in hardware."""
    checks = {"fp8": has_float8_tensor_cores, "bf16": has_bf16_products}
    return checks[name](device) if name in checks else name == "fp32" or device.type == "cuda"
