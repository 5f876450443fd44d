"""Matrix products, convolutions and attention among the calls of a step, with their sizes and FLOPs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch

from dtrain.planning.record.recorder import RecordedCall, TensorSpec
from dtrain.precision.rules import format_name

FPROP, DGRAD, WGRAD = "fprop", "dgrad", "wgrad"
MATMUL, CONVOLUTION, ATTENTION = "matmul", "convolution", "attention"

GROUPED = "_grouped_mm"
"""Products of each expert's rows and its weight, in one call: the rows of all are counted together."""

_PAIR, _SUM = ("bMK", "bKN"), ("bMN", "bMK", "bKN")
OPERANDS = {
    **dict.fromkeys(("mm", "bmm", GROUPED), _PAIR),
    **dict.fromkeys(("addmm", "baddbmm"), _SUM),
    "_scaled_mm": (*_PAIR, "bMN", "bMN", "bMN"),  # with two scales and a bias
    "_scaled_mm_v2": (*_PAIR, "bMN", "", "", "bMN"),
    "convolution": ("bc", "cc", "c"),
    "convolution_backward": ("bc", "bc", "cc", "c"),
}
"""Dimensions of the first arguments of an operation: the last ones of matrices, the first ones of convolutions."""


@dataclass(frozen=True)
class MatrixProduct:
    """A product of ``batch`` pairs of matrices [m, k] and [k, n].

    A convolution is counted as the product that im2col makes of it: m are its positions, k the values of a window. In
    attention m and n are the tokens of queries and keys, and k is the head dim; a pair is a head of a sample.

    Attributes:
        call: of the operation; one of backward bears the module of its forward.
        part: one of ``FPROP``, ``DGRAD``, ``WGRAD``. Gradients of attention, and of products of two
            activations, are ``DGRAD``.
        flops: two for each multiplication and addition; attention is counted in full, also if it is causal.
        nbytes: of operands and results, each read or written once.
        channels: that go into a convolution's forward, and that come out of it.
    """

    kind: str
    call: RecordedCall
    part: str
    m: int
    n: int
    k: int
    batch: int
    format: str
    flops: int
    nbytes: int
    channels: tuple[int, int] = (0, 0)

    @property
    def intensity(self) -> float:
        """FLOPs per byte of memory traffic."""
        return self.flops / self.nbytes

    @property
    def is_batched(self) -> bool:
        """Whether it multiplies several pairs of matrices, both of them activations."""
        return self.call.signature.name in ("bmm", "baddbmm")

    @property
    def is_grouped(self) -> bool:
        """Whether experts share M, or K in a weight gradient, in parts that depend on values."""
        return self.call.signature.name == GROUPED

    def efficiency(self, tile: tuple[int, int], num_sms: int) -> tuple[float, float]:
        """Returns the share of its tiles that the output fills, and of multiprocessors that have one in the waves."""
        tiles = math.ceil(self.m / tile[0]) * math.ceil(self.n / tile[1])
        all_tiles, size = tiles * self.batch, tiles * tile[0] * tile[1]
        return self.m * self.n / size, all_tiles / (math.ceil(all_tiles / num_sms) * num_sms)


def kind_of(name: str) -> str | None:
    """Returns the kind of the products that an operation of this name computes, or None."""
    if name in OPERANDS:
        return CONVOLUTION if name.startswith("convolution") else MATMUL
    return ATTENTION if name.startswith(("_scaled_dot_product_", "flex_attention")) else None


def computes_product(name: str) -> bool:
    """Whether an operation of this name, which the profiler has seen, runs the kernel of a product."""
    return kind_of(name) is not None or "conv" in name  # such as mkldnn_convolution, inside of convolution


def products(calls: Iterable[RecordedCall], *, tf32: bool = False) -> list[MatrixProduct]:
    """Returns the products of ``calls``, in their order; those of backward are assigned to the calls of forward."""
    found: list[MatrixProduct] = []
    forward: defaultdict[int, list[MatrixProduct]] = defaultdict(list)  # by the node of autograd
    for call in calls:
        kind = kind_of(call.signature.name)
        if kind == MATMUL:
            found.append(_matmul(call, forward[call.node]))
        elif kind == CONVOLUTION:
            found.extend(_convolutions(call))
        elif kind == ATTENTION:
            found.append(_attention(call))
    return [replace(one, format="tf32") if tf32 and one.format == "fp32" else one for one in found]


def _format(dtype: torch.dtype) -> str:
    return "fp8" if dtype.itemsize == 1 else format_name(dtype)


def _matmul(call: RecordedCall, forward: list[MatrixProduct]) -> MatrixProduct:
    """Returns the product of ``call``, which is added to ``forward``, those of its node, if it is not of backward."""
    first = _left(call)
    left, right = call.signature.args[first : first + 2]
    m, n, k = left.shape[-2], right.shape[-1], left.shape[-1]
    batch = left.shape[0] if len(left.shape) == len(right.shape) == 3 else 1
    flops, nbytes = 2 * batch * m * n * k, left.nbytes + right.nbytes + call.outputs[0].nbytes
    product = MatrixProduct(MATMUL, call, FPROP, m, n, k, batch, _format(left.dtype), flops, nbytes)
    if call.in_backward and not call.is_recomputed:
        return replace(product, part=_backward_part(product, forward))
    forward.append(product)
    return product


def _left(call: RecordedCall) -> int:
    """Returns the index of the left matrix among the arguments, and among the storages."""
    return OPERANDS[call.signature.name].index("bMK")


def _backward_part(product: MatrixProduct, forward: Iterable[MatrixProduct]) -> str:
    """Returns the part of a product of backward: a sum over the rows M of forward is a weight gradient, one over N not.

    If M = N, a weight gradient is the one that reads the storage of forward's left operand.
    """
    sides = {product.m, product.n}
    for candidate in forward:
        if candidate.is_batched:
            return DGRAD
        is_wgrad = product.k >= candidate.m and sides == {candidate.n, candidate.k}  # FP8 pads K
        is_dgrad = product.k == candidate.n and sides == {candidate.m, candidate.k}
        reads_left = candidate.call.storages[_left(candidate.call)] in product.call.storages
        if is_wgrad or is_dgrad:
            return WGRAD if is_wgrad and (reads_left or not is_dgrad) else DGRAD
    return DGRAD


def _convolutions(call: RecordedCall) -> Iterator[MatrixProduct]:
    args: Sequence[Any] = call.signature.args
    parts, y = [FPROP], call.outputs[0]
    if call.signature.name == "convolution_backward":
        y, *args, needed = args
        parts = list(compress((DGRAD, WGRAD), needed))
    x, weight, *_, transposed, _, groups = args
    small = x if transposed else y  # each of its positions has a window in the other
    positions = small.shape[0] * math.prod(small.shape[2:])
    filters, window = weight.shape[0] // groups, math.prod(weight.shape[1:])
    narrow, wide = (positions, filters, window), (positions, window, filters)
    fprop, dgrad = (wide, narrow) if transposed else (narrow, wide)
    sizes = {FPROP: fprop, DGRAD: dgrad, WGRAD: (filters, window, positions)}
    flops, nbytes = 2 * groups * positions * filters * window, x.nbytes + y.nbytes + weight.nbytes
    channels = (x.shape[1], y.shape[1])
    for part in parts:
        m, n, k = sizes[part]
        yield MatrixProduct(CONVOLUTION, call, part, m, n, k, groups, _format(x.dtype), flops, nbytes, channels)


def _attention(call: RecordedCall) -> MatrixProduct:
    name, args = call.signature.name, call.signature.args
    is_forward = not name.endswith("_backward")
    first = 0 if is_forward or name.startswith("flex") else 1  # after the gradient of the output
    queries, keys, values = args[first : first + 3]
    (batch, heads, m, k), n, value_dim = queries.shape, keys.shape[-2], values.shape[-1]
    # forward: scores and their sums; backward: scores again, and four gradients
    part, num_outputs, columns = (FPROP, 1, k + value_dim) if is_forward else (DGRAD, 3, 3 * k + 2 * value_dim)
    specs = (*(value for value in args if isinstance(value, TensorSpec)), *call.outputs[:num_outputs])
    nbytes = sum(spec.nbytes for spec in specs if len(spec.shape) == 4)
    pairs, flops = batch * heads, 2 * batch * heads * m * n * columns
    return MatrixProduct(ATTENTION, call, part, m, n, k, pairs, _format(queries.dtype), flops, nbytes)
