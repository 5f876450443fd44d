"""Sizes of products that break the rules of Tensor Cores and their like, each under the one cause of all its uses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from dtrain.planning.record.products import ATTENTION, CONVOLUTION, FPROP, WGRAD, MatrixProduct

BATCH, SIZE, HEAD_DIM = "batch", "size", "head dim"
MULTIPLES = {"tf32": 4, "bf16": 8, "fp16": 8, "fp8": 16}
"""Multiple that each dimension should be, by format: 16 bytes of it. Products in FP32 take any size alike."""

_MAX_FACTOR = 8
"""Largest factor by which a size is one of several that follow from another, such as queries, keys and values."""


@dataclass
class Cause:
    """A size that breaks a rule wherever it occurs.

    Attributes:
        kind: ``BATCH`` for rows of a micro-batch, ``SIZE`` for one of a parameter, or ``HEAD_DIM``.
        sizes: ``size``, and those of its multiples that break the rule too.
        uses: (module, dimension) in forward.
        products: in all passes, that have one of the sizes.
    """

    kind: str
    size: int
    multiple: int
    sizes: set[int] = field(default_factory=set)
    uses: dict[tuple[str, str], None] = field(default_factory=dict)
    products: list[MatrixProduct] = field(default_factory=list)

    def padded(self, size: int, multiple: int) -> int:
        """Returns what one of ``sizes`` becomes if ``self.size`` is padded to a multiple of ``multiple``."""
        return size // self.size * (self.size + -self.size % multiple)


def dimensions(product: MatrixProduct) -> list[tuple[str, str, int]]:
    """Returns (kind of cause, name, size) of each dimension with a rule; ``OPERANDS`` has the name's first letter."""
    if product.kind == ATTENTION:
        return [(HEAD_DIM, "head dim", product.k)]
    if product.kind == CONVOLUTION:
        return [(SIZE, f"channels {way}", size) for way, size in zip(("in", "out"), product.channels, strict=True)]
    rows = "" if product.is_batched else "K" if product.part == WGRAD else "M"
    sizes = {"M": product.m, "N": product.n, "K": product.k}
    if product.is_grouped:
        del sizes[rows]
    return [(BATCH if name == rows else SIZE, name, size) for name, size in sizes.items()]


def find_causes(products: Sequence[MatrixProduct], linears: Mapping[str, tuple[int, int]]) -> list[Cause]:
    """Returns the causes in the order in which forward meets them.

    FP8 products have the features of ``linears``, by name and as they go in and out, padded.
    """
    causes: dict[tuple[str, int, int], Cause] = {}
    for product in (one for one in products if one.part == FPROP and not one.call.is_recomputed):
        module, multiple = product.call.module, MULTIPLES.get(product.format, 1)
        unpadded = dict(zip("KN", linears.get(module, ()), strict=False)) if product.format == "fp8" else {}
        for kind, name, size in dimensions(product):
            size = unpadded.get(name, size)
            if size % multiple:
                cause = causes.setdefault((kind, size, multiple), Cause(kind, size, multiple, {size}))
                cause.uses[module, name] = None
    merged = _merge_multiples(causes.values())
    for cause in merged:
        of_uses = {(module, cause.multiple) for module, _ in cause.uses}
        cause.products = [one for one in products if (one.call.module, MULTIPLES.get(one.format, 1)) in of_uses]
    return merged


def _merge_multiples(causes: Collection[Cause]) -> list[Cause]:
    """Returns ``causes`` without those whose size is a small multiple of another's, which that one takes over."""
    kept: list[Cause] = []
    for cause in sorted(causes, key=lambda cause: cause.size):
        for base in kept:
            factor, rest = divmod(cause.size, base.size)
            is_multiple = rest == 0 and factor <= _MAX_FACTOR and base.size >= base.multiple == cause.multiple
            if is_multiple and cause.kind == base.kind == SIZE:
                base.sizes |= cause.sizes
                base.uses |= cause.uses
                break
        else:
            kept.append(cause)
    return [cause for cause in causes if cause in kept]
