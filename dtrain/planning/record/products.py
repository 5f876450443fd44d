"""Matrix products, convolutions and attention among the calls of a step, with their sizes and FLOPs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from dtrain.planning.record.recorder import RecordedCall, Signature, TensorSpec
from dtrain.precision.rules import format_name

FPROP, DGRAD, WGRAD = "fprop", "dgrad", "wgrad"
MATMUL, CONVOLUTION, ATTENTION = "matmul", "convolution", "attention"

GROUPED = "_grouped_mm"
"""Products of each expert's rows and its weight, in one call: the rows of all are counted together."""

MATRICES = {
    "mm": ("bmk", "bkn"),
    "bmm": ("bmk", "bkn"),
    GROUPED: ("bmk", "bkn"),
    "addmm": ("bmn", "bmk", "bkn"),
    "baddbmm": ("bmn", "bmk", "bkn"),
    "_scaled_mm": ("bmk", "bkn", "bmn", "bmn", "bmn"),  # with two scales and a bias
}
"""Operations of two matrices, and the last dimensions of their first arguments."""


@dataclass(frozen=True)
class MatrixProduct:
    """A product of ``batch`` pairs of matrices [m, k] and [k, n].

    A convolution is counted as the product that im2col makes of it: m are its positions, k the values of a window. In
    attention m and n are the tokens of queries and keys, and k is the head dim; a pair is a head of a sample.

    Attributes:
        kind: one of :data:`MATMUL`, :data:`CONVOLUTION`, :data:`ATTENTION`.
        call: of the operation; one of backward bears the module of its forward.
        part: one of :data:`FPROP`, :data:`DGRAD`, :data:`WGRAD`. Gradients of attention, and of products of two
            activations, are :data:`DGRAD`.
        flops: two for each multiplication and addition; attention is counted in full, also if it is causal.
        nbytes: of operands and results, each read or written once.
        tf32: whether FP32 is computed in TF32.
    """

    kind: str
    call: RecordedCall
    part: str
    m: int
    n: int
    k: int
    batch: int
    dtype: torch.dtype
    flops: int
    nbytes: int
    tf32: bool = False

    @property
    def format(self) -> str:
        if self.dtype.itemsize == 1:
            return "fp8"
        return "tf32" if self.tf32 and self.dtype == torch.float32 else format_name(self.dtype)

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

    def tile_efficiency(self, tile: tuple[int, int]) -> float:
        """Returns the share of the output's tiles that the output fills."""
        return self.m * self.n / (self._num_tiles(tile) / self.batch * tile[0] * tile[1])

    def wave_efficiency(self, tile: tuple[int, int], num_sms: int) -> float:
        """Returns the share of multiprocessors that have a tile, over the waves of ``num_sms`` tiles."""
        tiles = self._num_tiles(tile)
        return tiles / (math.ceil(tiles / num_sms) * num_sms)

    def _num_tiles(self, tile: tuple[int, int]) -> int:
        return math.ceil(self.m / tile[0]) * math.ceil(self.n / tile[1]) * self.batch


_Forward: TypeAlias = tuple[MatrixProduct, int]
"""A product of matrices in forward, and the storage of its left operand."""


def kind_of(name: str) -> str | None:
    """Returns the kind of the products that an operation of this name computes, or None."""
    if name in MATRICES:
        return MATMUL
    if name in ("convolution", "convolution_backward"):
        return CONVOLUTION
    return ATTENTION if name.startswith(("_scaled_dot_product_", "flex_attention")) else None


def computes_product(name: str) -> bool:
    """Whether an operation of this name, which the profiler has seen, runs the kernel of a product."""
    return kind_of(name) is not None or "conv" in name  # such as mkldnn_convolution, inside of convolution


def is_product(signature: Signature) -> bool:
    """Whether :func:`products` makes a :class:`MatrixProduct` of a call with this signature."""
    return kind_of(signature.name) is not None


def products(calls: Iterable[RecordedCall], *, tf32: bool = False) -> list[MatrixProduct]:
    """Returns the products of ``calls``, in their order; those of backward are assigned to the calls of forward."""
    found: list[MatrixProduct] = []
    forward: dict[int, list[_Forward]] = {}  # by the node of autograd
    for call in calls:
        kind = kind_of(call.signature.name)
        if kind == MATMUL:
            found.append(_matmul(call, forward))
        elif kind == CONVOLUTION:
            found.extend(_convolutions(call))
        elif kind == ATTENTION:
            found.append(_attention(call))
    return [replace(product, tf32=True) for product in found] if tf32 else found


def _matmul(call: RecordedCall, forward: dict[int, list[_Forward]]) -> MatrixProduct:
    """Returns the product of ``call``, which is added to ``forward`` if it is not one of backward."""
    first = MATRICES[call.signature.name].index("bmk")
    left, right = call.signature.args[first : first + 2]
    m, n, k = left.shape[-2], right.shape[-1], left.shape[-1]
    batch = left.shape[0] if len(left.shape) == len(right.shape) == 3 else 1
    flops, nbytes = 2 * batch * m * n * k, left.nbytes + right.nbytes + call.outputs[0].nbytes
    product = MatrixProduct(MATMUL, call, FPROP, m, n, k, batch, left.dtype, flops, nbytes)
    if call.in_backward and not call.is_recomputed:
        return replace(product, part=_backward_part(product, call.storages, forward.get(call.node, ())))
    forward.setdefault(call.node, []).append((product, call.storages[first]))
    return product


def _backward_part(product: MatrixProduct, storages: Sequence[int], candidates: Iterable[_Forward]) -> str:
    """Returns the part of a product of backward: a sum over the rows M of forward is a weight gradient, one over N not.

    If M = N, a weight gradient is the one that reads the storage of forward's left operand.
    """
    sides = sorted((product.m, product.n))
    for candidate, left in candidates:
        if candidate.is_batched:
            return DGRAD
        is_wgrad = product.k >= candidate.m and sides == sorted((candidate.n, candidate.k))  # FP8 pads K
        is_dgrad = product.k == candidate.n and sides == sorted((candidate.m, candidate.k))
        if is_wgrad and is_dgrad:
            return WGRAD if left in storages else DGRAD
        if is_wgrad or is_dgrad:
            return WGRAD if is_wgrad else DGRAD
    return DGRAD


def convolution_arguments(signature: Signature) -> tuple[TensorSpec, TensorSpec, bool, int]:
    """Returns the input of a convolution's forward, its weight, whether it is transposed, and its groups."""
    first = 1 if signature.name == "convolution_backward" else 0  # after the gradient of the output
    x, weight, *_, transposed, _, groups = signature.args[first : first + 9]
    return x, weight, transposed, groups


def _convolutions(call: RecordedCall) -> Iterator[MatrixProduct]:
    args = call.signature.args
    x, weight, transposed, groups = convolution_arguments(call.signature)
    parts, y = [FPROP], call.outputs[0]
    if call.signature.name == "convolution_backward":
        y, mask = args[0], args[10]
        parts = [part for part, is_needed in ((DGRAD, mask[0]), (WGRAD, mask[1])) if is_needed]
    small, large = (x, y) if transposed else (y, x)  # the window of a position of the first is in the second
    positions = small.shape[0] * math.prod(small.shape[2:])
    channels, inner = weight.shape[0] // groups, math.prod(weight.shape[1:])
    sizes = {
        FPROP: (positions, channels, inner),
        DGRAD: (positions, inner, channels),
        WGRAD: (channels, inner, positions),
    }
    if transposed:
        sizes[FPROP], sizes[DGRAD] = sizes[DGRAD], sizes[FPROP]
    flops, nbytes = 2 * groups * positions * channels * inner, small.nbytes + large.nbytes + weight.nbytes
    for part in parts:
        yield MatrixProduct(CONVOLUTION, call, part, *sizes[part], groups, x.dtype, flops, nbytes)


def _attention(call: RecordedCall) -> MatrixProduct:
    name, args = call.signature.name, call.signature.args
    is_forward = not name.endswith("_backward")
    first = 0 if is_forward or name.startswith("flex") else 1  # after the gradient of the output
    queries, keys, values = args[first : first + 3]
    batch, heads, m, head_dim = queries.shape
    n, value_dim = keys.shape[-2], values.shape[-1]
    # forward: scores and their sums; backward: scores again, and four gradients
    columns = head_dim + value_dim if is_forward else 3 * head_dim + 2 * value_dim
    flops = 2 * batch * heads * m * n * columns
    outputs = call.outputs[: 1 if is_forward else 3]
    specs = (*(value for value in args if isinstance(value, TensorSpec)), *outputs)
    nbytes = sum(spec.nbytes for spec in specs if len(spec.shape) == 4)
    part = FPROP if is_forward else DGRAD
    return MatrixProduct(ATTENTION, call, part, m, n, head_dim, batch * heads, queries.dtype, flops, nbytes)
