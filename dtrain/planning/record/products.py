"""Matrix products, convolutions and attention among the calls of a step, with their sizes and FLOPs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from dtrain.planning.record.recorder import RecordedCall, Signature, TensorSpec
from dtrain.precision.rules import format_name

FPROP, DGRAD, WGRAD = "fprop", "dgrad", "wgrad"
MATMUL, CONVOLUTION, ATTENTION = "matmul", "convolution", "attention"

GROUPED = "_grouped_mm"
"""Products of each expert's rows and its weight, in one call: the rows of all are counted together."""

_MATRICES = {"mm": 0, "bmm": 0, GROUPED: 0, "_scaled_mm": 0, "addmm": 1, "baddbmm": 1}
"""Operations of two matrices, and the argument in which the left one is."""

_FORWARD_ATTENTION = tuple(
    f"_scaled_dot_product_{name}"
    for name in (
        "flash_attention",
        "flash_attention_for_cpu",
        "efficient_attention",
        "cudnn_attention",
        "fused_attention_overrideable",
    )
)
_BACKWARD_ATTENTION = tuple(f"{name}_backward" for name in _FORWARD_ATTENTION)
_FLEX = ("flex_attention", "flex_attention_backward")
_CONVOLUTIONS = ("convolution", "convolution_backward")
_PRODUCTS = frozenset((*_MATRICES, *_CONVOLUTIONS, *_FORWARD_ATTENTION, *_BACKWARD_ATTENTION, *_FLEX))


@dataclass(frozen=True)
class MatrixProduct:
    """A product of ``batch`` pairs of matrices [m, k] and [k, n].

    A convolution is counted as the product that im2col makes of it: m are its positions, k the values of a window. In
    attention m and n are the tokens of queries and keys, and k is the head dim; a pair is a head of a sample.

    Attributes:
        kind: one of :data:`MATMUL`, :data:`CONVOLUTION`, :data:`ATTENTION`.
        module: name of the module that issued it; its backward bears the same.
        part: one of :data:`FPROP`, :data:`DGRAD`, :data:`WGRAD`. Gradients of attention, and of products of two
            activations, are :data:`DGRAD`.
        flops: two for each multiplication and addition; attention is counted in full, also if it is causal.
        nbytes: of operands and results, each read or written once.
        tf32: whether FP32 is computed in TF32.
    """

    kind: str
    module: str
    part: str
    m: int
    n: int
    k: int
    batch: int
    dtype: torch.dtype
    flops: int
    nbytes: int
    is_recomputed: bool
    signature: Signature
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
        return self.signature.name in ("bmm", "baddbmm")

    @property
    def is_grouped(self) -> bool:
        """Whether experts share M, or K in a weight gradient, in parts that depend on values."""
        return self.signature.name == GROUPED

    def tile_efficiency(self, tile: tuple[int, int]) -> float:
        """Returns the share of the output's tiles that the output fills."""
        return self.m * self.n / (self._num_tiles(tile) / self.batch * tile[0] * tile[1])

    def wave_efficiency(self, tile: tuple[int, int], num_sms: int) -> float:
        """Returns the share of multiprocessors that have a tile, over the waves of ``num_sms`` tiles."""
        tiles = self._num_tiles(tile)
        return tiles / (math.ceil(tiles / num_sms) * num_sms)

    def _num_tiles(self, tile: tuple[int, int]) -> int:
        return math.ceil(self.m / tile[0]) * math.ceil(self.n / tile[1]) * self.batch


def computes_product(name: str) -> bool:
    """Whether an operation of this name, which the profiler has seen, runs the kernel of a product."""
    return name in _PRODUCTS or "conv" in name  # such as mkldnn_convolution, inside of convolution


def is_product(signature: Signature) -> bool:
    """Whether :func:`products` makes a :class:`MatrixProduct` of a call with this signature."""
    return signature.name in _PRODUCTS


def products(calls: Iterable[RecordedCall], *, tf32: bool = False) -> list[MatrixProduct]:
    """Returns the products of ``calls``, in their order; those of backward are assigned to the calls of forward."""
    found: list[MatrixProduct] = []
    forward: dict[int, list[RecordedCall]] = {}  # products of matrices by the node of autograd
    for call in calls:
        if not is_product(call.signature):
            continue
        name, args = call.signature.name, call.signature.args
        if name in _MATRICES:
            if not call.in_backward or call.is_recomputed:
                forward.setdefault(call.node, []).append(call)
                part = FPROP
            else:
                part = _backward_part(call, forward.get(call.node, ()))
            found.append(_matmul(call, part))
        elif name == "convolution":
            found.append(_convolution(call, FPROP, args[0], args[1], call.outputs[0], args[6], args[8]))
        elif name == "convolution_backward":
            found.extend(_convolution_backward(call))
        elif name in (*_FORWARD_ATTENTION, _FLEX[0]):
            found.append(_attention(call, args[:3], is_forward=True))
        else:
            inputs = args[:3] if name == _FLEX[1] else args[1:4]
            found.append(_attention(call, inputs, is_forward=False))
    return [replace(product, tf32=True) for product in found] if tf32 else found


def _sides(call: RecordedCall) -> tuple[TensorSpec, TensorSpec]:
    first = _MATRICES[call.signature.name]
    left, right = call.signature.args[first : first + 2]
    return left, right


def _sizes(call: RecordedCall) -> tuple[int, int, int]:
    """Returns M, N, K."""
    left, right = _sides(call)
    return left.shape[-2], right.shape[-1], left.shape[-1]


def _backward_part(call: RecordedCall, candidates: Iterable[RecordedCall]) -> str:
    """Returns the part of a product of backward: a sum over the rows M of forward is a weight gradient, one over N not.

    If M = N, a weight gradient is the one that reads the storage of forward's left operand.
    """
    m, n, k = _sizes(call)
    for candidate in candidates:
        rows, columns, inner = _sizes(candidate)
        if len(_sides(candidate)[0].shape) == 3:  # both are activations
            return DGRAD
        is_wgrad = k >= rows and sorted((m, n)) == sorted((columns, inner))  # FP8 pads K
        is_dgrad = k == columns and sorted((m, n)) == sorted((rows, inner))
        if is_wgrad and is_dgrad:
            first = _MATRICES[candidate.signature.name]
            return WGRAD if candidate.storages[first] in call.storages else DGRAD
        if is_wgrad or is_dgrad:
            return WGRAD if is_wgrad else DGRAD
    return DGRAD


def _matmul(call: RecordedCall, part: str) -> MatrixProduct:
    left, right = _sides(call)
    m, n, k = _sizes(call)
    batch = left.shape[0] if len(left.shape) == len(right.shape) == 3 else 1
    nbytes = left.nbytes + right.nbytes + call.outputs[0].nbytes
    return _product(call, MATMUL, part, (m, n, k, batch), left.dtype, 2 * batch * m * n * k, nbytes)


def _convolution(
    call: RecordedCall, part: str, x: TensorSpec, weight: TensorSpec, y: TensorSpec, transposed: bool, groups: int
) -> MatrixProduct:
    small, large = (x, y) if transposed else (y, x)  # the window of a position of the first is in the second
    num_spatial = len(weight.shape) - 2
    has_batch = len(small.shape) == len(weight.shape)
    positions = math.prod(small.shape[-num_spatial:]) * (small.shape[0] if has_batch else 1)
    channels, inner = weight.shape[0] // groups, math.prod(weight.shape[1:])
    sizes = {
        FPROP: (positions, channels, inner),
        DGRAD: (positions, inner, channels),
        WGRAD: (channels, inner, positions),
    }
    if transposed:
        sizes[FPROP], sizes[DGRAD] = sizes[DGRAD], sizes[FPROP]
    flops = 2 * groups * positions * channels * inner
    return _product(
        call, CONVOLUTION, part, (*sizes[part], groups), x.dtype, flops, small.nbytes + large.nbytes + weight.nbytes
    )


def _convolution_backward(call: RecordedCall) -> Iterator[MatrixProduct]:
    args = call.signature.args
    dy, x, weight, transposed, groups, mask = *args[:3], args[7], args[9], args[10]
    for part, is_needed in ((DGRAD, mask[0]), (WGRAD, mask[1])):
        if is_needed:
            yield _convolution(call, part, x, weight, dy, transposed, groups)


def _attention(call: RecordedCall, inputs: tuple[Any, ...], *, is_forward: bool) -> MatrixProduct:
    queries, keys, values = inputs
    batch, heads, m, head_dim = queries.shape
    n, value_dim = keys.shape[-2], values.shape[-1]
    # forward: scores and their sums; backward: scores again, and four gradients
    columns = head_dim + value_dim if is_forward else 3 * head_dim + 2 * value_dim
    flops = 2 * batch * heads * m * n * columns
    outputs = call.outputs[:1] if is_forward else call.outputs[:3]
    specs = (*(value for value in call.signature.args if isinstance(value, TensorSpec)), *outputs)
    nbytes = sum(spec.nbytes for spec in specs if len(spec.shape) == 4)
    part = FPROP if is_forward else DGRAD
    return _product(call, ATTENTION, part, (m, n, head_dim, batch * heads), queries.dtype, flops, nbytes)


def _product(
    call: RecordedCall,
    kind: str,
    part: str,
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    flops: int,
    nbytes: int,
) -> MatrixProduct:
    return MatrixProduct(kind, call.module, part, *sizes, dtype, flops, nbytes, call.is_recomputed, call.signature)
