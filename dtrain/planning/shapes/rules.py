"""Sizes of products that break the rules of Tensor Cores and their like, each under the one cause of all its uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dtrain.planning.record.products import ATTENTION, CONVOLUTION, FPROP, MatrixProduct, convolution_arguments

BATCH, SIZE, HEAD_DIM = "batch", "size", "head dim"
MULTIPLES = {"tf32": 4, "bf16": 8, "fp16": 8, "fp8": 16}
"""Multiple that each dimension should be, by format: 16 bytes of it. Products in FP32 take any size alike."""

_MAX_FACTOR = 8
"""Largest factor by which a size is one of several that follow from another, such as queries, keys and values."""


@dataclass
class Cause:
    """A size that breaks a rule wherever it occurs.

    Attributes:
        kind: :data:`BATCH` for rows of a micro-batch, :data:`SIZE` for one of a parameter, or :data:`HEAD_DIM`.
        size: the size.
        multiple: it should be one.
        sizes: the size, and those of its multiples that break the rule too.
        uses: (module, dimension) in forward.
        products: in all passes, that have one of the sizes.
    """

    kind: str
    size: int
    multiple: int
    sizes: set[int] = field(default_factory=set)
    uses: dict[tuple[str, str], None] = field(default_factory=dict)
    products: list[MatrixProduct] = field(default_factory=list)

    def padded(self, size: int, multiple: int | None = None) -> int:
        """Returns what one of ``sizes`` becomes if ``size`` is padded to a multiple."""
        return size // self.size * (self.size + -self.size % (multiple or self.multiple))


def find_causes(products: Sequence[MatrixProduct], linears: Mapping[str, tuple[int, int]]) -> list[Cause]:
    """Returns the causes in the order in which forward meets them.

    FP8 products have the features of ``linears``, by name and as they go in and out, padded.
    """
    causes: dict[tuple[str, int, int], Cause] = {}
    for product in products:
        if product.part != FPROP or product.call.is_recomputed:
            continue
        multiple = MULTIPLES.get(product.format, 1)
        for kind, dimension, size in _sizes(product, linears):
            if size % multiple:
                cause = causes.setdefault((kind, size, multiple), Cause(kind, size, multiple, {size}))
                cause.uses[product.call.module, dimension] = None
    merged = _merge_multiples(causes)
    for cause in merged:
        modules = {module for module, _ in cause.uses}
        of_modules = (product for product in products if product.call.module in modules)
        cause.products = [product for product in of_modules if MULTIPLES.get(product.format, 1) == cause.multiple]
    return merged


def channels(product: MatrixProduct) -> tuple[int, int]:
    """Returns the channels that go into a convolution's forward, and those that come out of it."""
    _, weight, transposed, groups = convolution_arguments(product.call.signature)
    first, second = weight.shape[0], weight.shape[1] * groups
    return (first, second) if transposed else (second, first)


def _sizes(product: MatrixProduct, linears: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, str, int]]:
    if product.kind == ATTENTION:
        yield HEAD_DIM, "head dim", product.k
    elif product.kind == CONVOLUTION:
        into, out = channels(product)
        yield from ((SIZE, "channels in", into), (SIZE, "channels out", out))
    elif product.is_batched:
        yield from ((SIZE, "M", product.m), (SIZE, "N", product.n), (SIZE, "K", product.k))
    else:
        n, k = product.n, product.k
        if product.format == "fp8" and product.call.module in linears:
            k, n = linears[product.call.module]
        if not product.is_grouped:
            yield BATCH, "M", product.m
        yield from ((SIZE, "N", n), (SIZE, "K", k))


def _merge_multiples(causes: Mapping[tuple[str, int, int], Cause]) -> list[Cause]:
    """Returns ``causes`` without those whose size is a small multiple of another's, which that one takes over."""
    kept: list[Cause] = []
    for cause in sorted(causes.values(), key=lambda cause: cause.size):
        base = next((other for other in kept if _follows(cause, other)), None)
        if base is None:
            kept.append(cause)
        else:
            base.sizes |= cause.sizes
            base.uses |= cause.uses
    return [cause for cause in causes.values() if cause in kept]


def _follows(cause: Cause, base: Cause) -> bool:
    factor, rest = divmod(cause.size, base.size)
    is_multiple = rest == 0 and factor <= _MAX_FACTOR and base.size >= base.multiple
    return cause.kind == base.kind == SIZE and cause.multiple == base.multiple and is_multiple
