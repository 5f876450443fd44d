"""Times products that break a rule as they are and padded."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch

from dtrain.planning.record.products import ATTENTION, CONVOLUTION, WGRAD, MatrixProduct
from dtrain.planning.record.recorder import Signature, TensorSpec
from dtrain.planning.shapes.rules import Cause, affected, channels
from dtrain.planning.shapes.timed_calls import bind, median_ms

MIN_GAIN = 0.03
"""Smallest share of the products' time that an advice must save."""


def measured_gain(cause: Cause, multiple: int, device: torch.device, budget_s: float) -> float | None:
    """Returns the share of the time of the products of ``cause`` that padding to ``multiple`` saves.

    It is None if the measurement would take more than ``budget_s`` seconds.
    """
    counts = Counter(
        (product.signature, changed)
        for product in cause.products
        if (changed := padded_signature(cause, product, multiple)) is not None
    )
    if not counts:
        return None
    deadline = time.monotonic() + budget_s
    before = after = 0.0
    for (own, changed), count in counts.most_common():
        times = median_ms([bind(call, device) for call in (own, changed)], device, deadline - time.monotonic())
        if times is None:
            return None
        before += count * times[0]
        after += count * times[1]
    return 1 - after / before


def padded_signature(cause: Cause, product: MatrixProduct, multiple: int) -> Signature | None:
    """Returns the call of ``product`` with the sizes of ``cause`` padded, or None if it has none of them."""
    if product.kind == CONVOLUTION:
        return _padded_convolution(cause, product, multiple)
    sizes = {name: cause.padded(size, multiple) for name, size in affected(cause, product).items()}
    if not sizes:
        return None
    if product.kind == ATTENTION:
        heads = (product.k, sizes["k"])
        return _mapped(product.signature, lambda spec: _resized(spec, {-1: heads} if len(spec.shape) == 4 else {}))
    m, n, k = (sizes.get(name, getattr(product, name)) for name in ("m", "n", "k"))
    first = 1 if "add" in product.signature.name else 0
    wanted = [(m, k), (k, n)]
    if first:
        wanted.insert(0, (m, n))
    specs = iter(wanted)

    def resize(spec: TensorSpec) -> TensorSpec:
        rows, columns = next(specs, spec.shape[-2:] or (0, 0))
        if len(spec.shape) < 2:  # a bias, a scale, or where the rows of experts end
            return _resized(spec, {-1: (product.n, n)}) if spec.shape and spec.dtype.is_floating_point else spec
        return _resized(spec, {-2: (spec.shape[-2], rows), -1: (spec.shape[-1], columns)})

    return _mapped(product.signature, resize)


def _padded_convolution(cause: Cause, product: MatrixProduct, multiple: int) -> Signature | None:
    into, out = channels(product)
    new = {size: cause.padded(size, multiple) for size in (into, out) if size in cause.sizes}
    args = product.signature.args
    is_backward = product.signature.name == "convolution_backward"
    if not new or args[9 if is_backward else 8] != 1 or (is_backward and product.part == WGRAD and args[10][0]):
        return None  # with groups; or the other gradient of the same call stands for both
    index = 2 if is_backward else 1
    values = list(args)
    for position in range(index + 2):
        spec = values[position]
        if isinstance(spec, TensorSpec):
            dims = (0, 1) if position == index else (0,) if len(spec.shape) == 1 else (1,)
            values[position] = _resized(
                spec, {dim: (spec.shape[dim], new.get(spec.shape[dim], spec.shape[dim])) for dim in dims}
            )
    if is_backward and args[3]:  # sizes of the bias
        values[3] = tuple(new.get(size, size) for size in args[3])
    return replace(product.signature, args=tuple(values))


def _mapped(signature: Signature, change: Callable[[TensorSpec], TensorSpec]) -> Signature:
    return signature.map(lambda value: change(value) if isinstance(value, TensorSpec) else value)


def _resized(spec: TensorSpec, sizes: dict[int, tuple[int, int]]) -> TensorSpec:
    """Returns ``spec`` with other sizes by dimension, (old, new), its dimensions in the same order in memory."""
    shape = list(spec.shape)
    for dim, (old, new) in sizes.items():
        assert shape[dim] == old
        shape[dim] = new
    order = sorted(range(len(shape)), key=lambda dim: (spec.stride[dim], -dim))
    stride, step = [0] * len(shape), 1
    for dim in order:
        if spec.stride[dim]:  # else it is expanded
            stride[dim] = step
            step *= shape[dim]
    return TensorSpec(tuple(shape), tuple(stride), spec.dtype)
